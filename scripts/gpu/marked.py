"""The tests that are marked ``gpu``, file by file: what one does to the device ends with it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from experiments.records import provenance
from experiments.records.environment import named, passed_on
from scripts.gpu.records import Brief, Deadline, Record

_MARK = "pytest.mark.gpu"
#: A test and what came of it, as ``pytest -v`` writes it at once, so that a kill loses none.
_OUTCOME = re.compile(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)
_MISSING = re.compile(r"No module named '(\w+)")
#: Exit statuses of pytest: an error in a test file, or in a conftest; and no test has the mark.
_NOT_COLLECTED, _NO_TESTS = (2, 4), 5
_LONGEST_TEXT = 1500
#: Under this nothing is started any more.
_LEAST_S = 10.0


def files(root: Path) -> list[Path]:
    """Test files with the mark, relative to ``root``."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [file.relative_to(root) for file in found if _MARK in file.read_text(encoding="utf-8")]


def check(record: Record, brief: Brief, limit_s: float) -> None:
    """Run them all within ``limit_s`` and note what came of each file."""
    if importlib.util.find_spec("pytest") is None:
        record.not_measured("GPU-marked tests", "pytest is not installed")
        return
    deadline, counts = Deadline(limit_s), Counter[str]()
    record.details["tests"] = {}
    # Without a GPU all are skipped: one file shows that much.
    for file in files(provenance.ROOT)[-1 if brief.small else 0 :]:
        name = f"GPU-marked tests of {file}"
        if deadline.left() < _LEAST_S:
            record.failed(name, f"not begun: the {limit_s:.0f} s of this part were over")
            continue
        status, said = _run(file, brief, deadline.left())
        record.details["tests"][str(file)] = judge(record, name, status, said)
        counts += Counter(record.details["tests"][str(file)].values())
    record.figures["tests"] = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))


def _run(file: Path, brief: Brief, limit_s: float) -> tuple[int | None, str]:
    """The exit status of pytest, ``None`` if it had to be ended, and what it wrote."""
    # PyTorch's own: a kernel that touches what another stream does, without a wait, is an error.
    environment = {**passed_on(os.environ, named(os.environ)), "TORCH_CUDA_SANITIZER": "1"}
    # Options that pytest's plugins define are left out: the plugins may be missing.
    options = ["-o", "addopts=", "-o", "minversion=0", "-p", "no:cacheprovider", "--color=no"]
    target = brief.scratch / f"{file.stem}.txt"
    with target.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "-v", "-rs", "-m", "gpu", str(file)],
            cwd=provenance.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # tests start ranks of their own, which must end with them
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            status = process.returncode
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, target.read_text(encoding="utf-8", errors="replace")


def judge(record: Record, name: str, status: int | None, said: str) -> dict[str, str]:
    """Note the file's verdict; return its tests with what came of each."""
    outcomes = {test: outcome.lower() for test, outcome in _OUTCOME.findall(said)}
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    # All that could not be imported is not installed if it is no part of this repository.
    missing = _MISSING.findall(said)
    ours = [provenance.ROOT / package for package in missing]
    if status is None:
        record.failed(name, f"did not end in time\n{said[-_LONGEST_TEXT:]}")
    elif status in _NOT_COLLECTED and missing and not any(map(Path.is_dir, ours)):
        record.not_measured(name, f"a package is not installed: {missing[0]}")
    elif status not in (0, _NO_TESTS):
        record.failed(name, said[-_LONGEST_TEXT:])
    elif passed:
        record.passed_if(True, name, f"{passed} passed")
    else:
        why = re.search(r"^SKIPPED .*$", said, re.MULTILINE)
        record.not_measured(name, why[0] if why else "no test was found")
    return outcomes

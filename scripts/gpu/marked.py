"""The tests that are marked ``gpu``, file by file: what one does to the device ends with it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.records import provenance
from scripts.gpu.records import Brief, Deadline, Record

_MARK = "pytest.mark.gpu"
#: Names, to pytest's process, the file for outcomes.
_OUTCOMES = "FCDP_GPU_OUTCOMES"
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
    deadline = Deadline(limit_s)
    found: dict[str, Any] = {}
    # Without a GPU all are skipped: one file shows that much.
    for file in files(provenance.ROOT)[-1 if brief.small else 0 :]:
        name = f"GPU-marked tests of {file}"
        if deadline.left() < _LEAST_S:
            record.failed(name, f"not begun: the {limit_s:.0f} s of this part were over")
            continue
        lines, error = _run(file, brief, deadline.left())
        found[str(file)] = lines
        _judge(record, name, lines, error)
    record.details["tests"] = found
    counts = Counter(line["outcome"] for lines in found.values() for line in lines)
    record.figures["tests"] = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))


def _run(file: Path, brief: Brief, limit_s: float) -> tuple[list[dict[str, str]], str]:
    """The tests' outcomes, and why pytest itself did not end well."""
    target = brief.scratch / f"{file.stem}.jsonl"
    environment = {**provenance.without_secrets(os.environ), _OUTCOMES: str(target)}
    # PyTorch's own: a kernel that touches what another stream does, without a wait, is an error.
    environment["TORCH_CUDA_SANITIZER"] = "1"
    # Options that pytest's plugins define are left out: the plugins may be missing.
    options = ["-o", "addopts=", "-o", "minversion=0", "-p", "no:cacheprovider", "-q"]
    plugin = ["-p", __name__]  # for its hooks, below
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *plugin, "-m", "gpu", str(file)],
        cwd=provenance.ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # tests start ranks of their own, which must end with them
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
        error = "" if process.returncode in (0, 1) else f"{process.returncode}: {said[-1500:]}"
    except subprocess.TimeoutExpired:
        error = f"did not end within {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = target.read_text(encoding="utf-8") if target.exists() else ""
    return [_scrubbed(json.loads(line)) for line in text.splitlines()], error


def _scrubbed(line: dict[str, str]) -> dict[str, str]:
    return {key: provenance.scrub(value) for key, value in line.items() if value}


def _lacks_a_package(said: str) -> bool:
    """Whether a package is not installed; a module of this repository is another matter."""
    found = re.search(r"No module named '(\w+)", said)
    return found is not None and not (provenance.ROOT / found[1]).is_dir()


def _judge(record: Record, name: str, lines: list[dict[str, str]], error: str) -> None:
    by_outcome: dict[str, list[str]] = {}
    for line in lines:
        by_outcome.setdefault(line["outcome"], []).append(
            f"{line.get('said', '')} ({line['test']})".strip()
        )
    missing = by_outcome.get("not collected")
    if missing and all(map(_lacks_a_package, missing)):
        record.not_measured(name, missing[0].strip().splitlines()[-1])
    elif by_outcome.get("failed") or missing:
        record.failed(name, "\n".join([*by_outcome.get("failed", []), *(missing or [])]))
    elif error:
        record.failed(name, error)
    elif "passed" in by_outcome:
        record.passed_if(True, name, f"{len(by_outcome['passed'])} passed")
    else:
        said = by_outcome.get("skipped", ["no test was found"])
        record.not_measured(name, said[0])


def pytest_runtest_logreport(report: Any) -> None:
    """Write each test's outcome as a line, at once, so that a kill loses none."""
    if report.when == "call" or report.outcome != "passed":
        _write_outcome(report.nodeid, report.outcome, report.longrepr)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write_outcome(report.nodeid, "not collected", report.longrepr)


def _write_outcome(test: str, outcome: str, said: object) -> None:
    # A skip's is (file, line, reason); an error's ends with what was raised.
    last = said[-1] if isinstance(said, tuple) else str(said or "").strip()
    line = {"test": test, "outcome": outcome, "said": str(last)[-600:]}
    with open(os.environ[_OUTCOMES], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")

"""Put small faults into ``fcdp/``, one at a time, and see which of them the tests catch.

    python -m scripts.mutants                     those that the record has no outcome of
    python -m scripts.mutants staleness cache     all of these files and folders
    python -m scripts.mutants all                 all, in hours; what was tried before is looked up
    python -m scripts.mutants --seconds 75 --seed "$(git rev-parse HEAD)"      a sample

Fails where a mutant survives that ``results/mutants/equivalent.yaml`` does not explain; one that it
explains is tried by the quick tests alone. The first and the third command write
``results/mutants/mutants.jsonl`` and results/mutants/README.md anew, in which mutants that were not
tried keep the outcome that they had.
"""

import argparse
import gc
import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.mutants import record
from scripts.mutants.files import mutants, part_of, tests_of
from scripts.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
#: Limit in seconds of tests whose duration is unknown: a mutant may run for ever.
_LIMIT_S = 400.0
#: And of the one test that caught a mutant before.
_KNOWN_LIMIT_S = 100.0
#: Modules that the tests import beside this repository's own, once for all mutants.
_PRELOADED = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.testing"),
    *("pytest", "hypothesis.strategies", "pydantic", "typer", "yaml", "peft"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"),
    "numba",
)
#: Tests are copied too: pytest caches their byte code beside them, with the copy's path.
_COPIED = ("fcdp", "tests")
#: Packages of this repository that the parent may have imported: each tree has its own.
_OWN = {"fcdp", "scripts", "simulation"}
#: Folders that no tree needs.
_LEFT_OUT = {"build", "runs", "dist", ".venv", ".mutants"}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants")
    parser.add_argument(
        "files",
        nargs="*",
        help="files and folders right below fcdp, or all; default: what the record does not have",
    )
    parser.add_argument("--seconds", type=float, help="try what fits into this time")
    parser.add_argument("--seed", default="", help="what a sample is drawn from")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    parser.add_argument("--unit", action="store_true", help="by tests of one process alone")
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    options = parser.parse_args(arguments)

    every = [*mutants(ROOT)]
    if unknown := {*options.files} - {"all", *(part_of(each.file) for each in every)}:
        parser.error(f"no mutants are in {', '.join(sorted(unknown))}")
    chosen = _chosen(every, options)
    if options.list:
        print(*chosen, sep="\n")
        return 0
    os.nice(10)
    caught_by = _sample(chosen, options) if options.seconds else _all(chosen, options)
    if not (options.unit or options.seconds) and options.files in ([], ["all"]):
        record.write(ROOT, every, caught_by)
    return record.report(ROOT, caught_by)


def _chosen(every: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    if options.files and "all" not in options.files:
        return [each for each in every if part_of(each.file) in options.files]
    if options.files or options.seconds:
        return every
    caught, reasons = record.catchers(ROOT), record.reasons(ROOT)

    def is_settled(mutant: Mutant) -> bool:
        by = caught.get(mutant.name)
        return bool(by) or (by == "" and record.key(mutant) in reasons)

    return [each for each in every if not is_settled(each)]


def _all(chosen: Sequence[Mutant], options: argparse.Namespace) -> dict[Mutant, str]:
    """The test that caught each mutant; an empty string for a survivor."""
    cache, reasons = record.Cache(ROOT), record.reasons(ROOT)
    caught_by = {each: caught for each in chosen if (caught := cache.get(each)) is not None}
    print(f"{len(chosen)} mutants, {len(caught_by)} of them tried before", flush=True)
    for mutant, caught in _try([each for each in chosen if each not in caught_by], options, None):
        caught_by[mutant] = caught
        if caught or not (options.unit or record.key(mutant) in reasons):
            cache.add(mutant, caught)
    return {each: caught_by[each] for each in chosen}


def _sample(chosen: list[Mutant], options: argparse.Namespace) -> dict[Mutant, str]:
    """Try mutants that a test of the record catches: one that survives now has lost its test.

    Those that hang, for the whole limit, or end the process are left out.
    """
    caught = record.catchers(ROOT)
    chosen = [each for each in chosen if caught.get(each.name, "").startswith("tests/")]
    random.Random(options.seed).shuffle(chosen)
    return dict(_try(chosen, options, time.monotonic() + options.seconds))


def _try(
    left: Sequence[Mutant], options: argparse.Namespace, ends: float | None
) -> Iterator[tuple[Mutant, str]]:
    """Try mutants in parallel until the time ends; yield each outcome as soon as it is known."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: what is forked has no threads
    for name in _PRELOADED:
        importlib.import_module(name)
    numba = sys.modules["numba"]
    numba.njit(lambda values: values[0])(np.zeros(1))  # the first loop takes seconds more
    gc.freeze()
    context = multiprocessing.get_context("fork")
    all_tiers = ("unit", "ranks and not drawn", "system or ranks and drawn")
    tiers = ("unit",) if options.unit else all_tiers
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fcdp-mutants-") as folder:
        settings = (Path(folder), tiers, record.catchers(ROOT), record.reasons(ROOT), ends)
        with ProcessPoolExecutor(options.jobs, context, _Worker.begin, settings) as pool:
            tried = {pool.submit(_Worker.attempt, each): each for each in left}
            for count, future in enumerate(as_completed(tried), 1):
                if (caught := future.result()) is None:
                    continue
                mutant = tried[future]
                minutes = (time.monotonic() - began) / count * (len(left) - count) / 60
                if not caught:
                    print(f"survived: {mutant}", flush=True)
                if count % 20 == 0 and ends is None:
                    print(f"{count} of {len(left)}, {minutes:.0f} minutes left", flush=True)
                yield mutant, caught


class _Worker:
    """One of the processes that try mutants, and its tree."""

    _instance: "_Worker"

    def __init__(
        self,
        folder: Path,
        tiers: Sequence[str],
        catchers: dict[tuple[str | int, ...], str],
        reasons: Mapping[record.Key, str],
        ends: float | None,
    ) -> None:
        self._tree = Tree(ROOT, folder / str(os.getpid()))
        self._tiers = tiers
        self._catchers = catchers
        self._reasons = reasons
        self._ends = ends
        #: Limits of unit tests in seconds; measuring them shows that they pass without a mutant.
        self._limits: dict[tuple[str, ...], float] = {}

    @classmethod
    def begin(cls, *settings: Any) -> None:
        cls._instance = cls(*settings)

    @classmethod
    def attempt(cls, mutant: Mutant) -> str | None:
        """The test that caught the mutant; ``None`` once the time has ended."""
        worker = cls._instance
        if worker._ends is not None and time.monotonic() > worker._ends:
            return None
        return worker._attempt(mutant)

    def _attempt(self, mutant: Mutant) -> str:
        before = self._catchers.get(mutant.name, "")
        if before.startswith("tests/"):
            outcome = self._run(mutant, [before], _KNOWN_LIMIT_S)
            if outcome.status not in (0, 4, 5):  # 4: that test has been removed
                return outcome.by
        # No test should catch one that has a reason: the quick ones alone try to.
        explained = record.key(mutant) in self._reasons
        for tier in self._tiers[:1] if explained else self._tiers:
            tests = (*tests_of(mutant.file), "-m", tier)
            if tier == "unit" and self._ends is None and tests not in self._limits:
                self._limits[tests] = self._measured(tests)
            outcome = self._run(mutant, tests, self._limits.get(tests, _LIMIT_S))
            if not outcome.passed:
                return outcome.by
        return ""

    def _run(self, mutant: Mutant, tests: Sequence[str], limit_s: float) -> "Outcome":
        self._tree.put(mutant)
        try:
            return run(self._tree, tests, limit_s)
        finally:
            self._tree.restore(mutant)

    def _measured(self, tests: Sequence[str]) -> float:
        """Several times the duration of passing tests; raises ``RuntimeError`` if one fails."""
        began = time.monotonic()
        outcome = run(self._tree, tests, 3 * _LIMIT_S, compiled=True)
        if not outcome.passed:
            raise RuntimeError(f"{outcome.by} fails without a mutant")
        return 30 + 5 * (time.monotonic() - began)


# The process that runs tests has imported torch, and so have its forks: that saves seconds per
# mutant.


class Outcome(NamedTuple):
    """pytest's exit status, ``None`` if it did not end; and the first test that failed."""

    status: int | None
    by: str

    @property
    def passed(self) -> bool:
        return self.status in (0, 5)  # 5: nothing was to be run


class Tree:
    """A copy of the tree to put a mutant into; what never changes is linked."""

    def __init__(self, root: Path, place: Path) -> None:
        self._root, self.place = root, place
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for path in root.iterdir():
            if path.name in _COPIED:
                shutil.copytree(path, place / path.name)
            elif path.name not in _LEFT_OUT:
                (place / path.name).symlink_to(path)

    def put(self, mutant: Mutant) -> None:
        (self.place / mutant.file).write_text(mutant.source, encoding="utf-8")
        self._forget(mutant)

    def restore(self, mutant: Mutant) -> None:
        shutil.copy2(self._root / mutant.file, self.place / mutant.file)
        self._forget(mutant)
        shutil.rmtree(self.place / ".hypothesis", ignore_errors=True)

    def _forget(self, mutant: Mutant) -> None:
        """Remove the code that numba has cached for a file's loops.

        numba's index names a new source before its code has replaced the old one's: a process that
        is killed or reads in between takes one for the other.
        """
        path = self.place / mutant.file
        for cached in path.parent.glob(f"__pycache__/{path.stem}.*.nb[ic]"):
            cached.unlink()


def run(tree: Tree, arguments: Sequence[str], limit_s: float, *, compiled: bool = False) -> Outcome:
    """Run pytest on a tree until the first test that fails.

    ``compiled``: byte code of imported modules is written.
    """
    log = tree.place / "log.txt"
    process = os.fork()
    if process == 0:
        _test(tree.place, log, arguments, compiled)
    ends = time.monotonic() + limit_s
    try:
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            if time.monotonic() > ends:
                return Outcome(None, "a hang")
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # and whatever ranks it started
        with suppress(ChildProcessError):
            os.waitpid(process, 0)
    text = log.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
    by = match[1] if match else "the end of the process"
    return Outcome(os.waitstatus_to_exitcode(ended[1]), by)


class _NoShrinking:
    """Makes hypothesis stop at the first example that fails, and draw the same in every run."""

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile(
            "mutants",
            settings(),
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
        )
        settings.load_profile("mutants")


def _test(place: Path, log: Path, arguments: Sequence[str], compiled: bool) -> None:
    """Run pytest in a tree, as the forked process, and exit."""
    status = 3
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(place)
        sys.path[0] = str(place)
        for name in [name for name in sys.modules if name.partition(".")[0] in _OWN]:
            del sys.modules[name]
        if not compiled:
            # A mutant's byte code would pass for the next one's: same size, same second.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.environ["FCDP_TESTS_FORK"] = "1"
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--color=no"]
        status = int(pytest.main([*options, *arguments], plugins=[_NoShrinking()]))
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs tests on copies of the tree, each with a mutant in it; one process per run, forked.

Whoever runs this has imported torch; what it forks has it already, which saves seconds a mutant.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from scripts.mutants.mutant import Mutant

#: The tests are copied too: pytest keeps what it compiles beside them, with the copy's path.
_COPIED = ("fcdp", "tests")
#: Packages of this repository that whoever forks may have imported: each tree has its own.
_OWN = {"fcdp", "scripts", "simulation"}
#: Not the tree's own.
_LEFT_OUT = {"build", "runs", "dist", ".venv", ".mutants"}


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

    def restore(self, mutant: Mutant) -> None:
        shutil.copy2(self._root / mutant.file, self.place / mutant.file)
        shutil.rmtree(self.place / ".hypothesis", ignore_errors=True)


def run(tree: Tree, arguments: Sequence[str], limit_s: float, *, compiled: bool = False) -> Outcome:
    """Run pytest on a tree until the first test that fails.

    ``compiled``: what is imported is kept as byte code.
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
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
    by = found[1] if found else "the end of the process"
    return Outcome(os.waitstatus_to_exitcode(ended[1]), by)


class _NoShrinking:
    """Has hypothesis stop at the first example that fails, and draw the same in every run."""

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
    """Become a process that runs pytest in a tree, and end."""
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

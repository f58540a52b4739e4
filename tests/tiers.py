"""Tiers of tests: ``unit``, ``ranks`` and ``cluster``, each test in one.

A test's tier follows from the fixtures that it uses (``FIXTURES``), or is marked where those do not
show it: ``pytestmark = pytest.mark.ranks``. All others are unit tests, and are held to it: one
that starts a process or a process group fails, so that none takes the quick tier's time unnoticed.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

TIERS = {
    "unit": "one process, no process group",
    "ranks": "processes: rank pools, process groups, commands",
    "cluster": "network namespaces, emulated clusters, launchers",
}
_ORDER = [*TIERS]
#: Who uses one of these is in the tier beside it; the highest counts.
FIXTURES = {"ranks": "ranks", "privileged": "cluster"}
#: Audit events of what starts a process, and where in their arguments the program is.
_EVENTS = {"subprocess.Popen": 0, "os.posix_spawn": 0, "os.system": 0, "os.fork": None}
#: Programs that libraries ask for facts, in milliseconds: which commit, which libraries.
_QUICK = frozenset({"git", "ldconfig", "/sbin/ldconfig", "uname"})


def tier_of(marks: set[str], fixtures: set[str]) -> str:
    """The tier of a test with these markers and fixtures.

    Raises ``ValueError`` for one that is marked with several tiers, or with a lower one than a
    fixture that it uses.
    """
    marked = [tier for tier in _ORDER if tier in marks]
    if len(marked) > 1:
        raise ValueError(f"marked as {' and '.join(marked)}: a test is in one tier")
    shown = max(
        (FIXTURES[name] for name in fixtures & {*FIXTURES}), key=_ORDER.index, default="unit"
    )
    if marked and _ORDER.index(marked[0]) < _ORDER.index(shown):
        raise ValueError(f"marked as {marked[0]}, and uses a fixture of {shown}")
    return marked[0] if marked else shown


def install(config: pytest.Config) -> None:
    """Register the tiers' markers, and what marks and watches tests."""
    for tier, has in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {has}")
    tiers = _Tiers()
    config.pluginmanager.register(tiers)
    sys.addaudithook(tiers.audit)
    tiers.watch(multiprocessing.process.BaseProcess, "start")
    tiers.watch(dist, "init_process_group")


class _Tiers:
    """Marks each collected test with its tier, and watches those of the tier ``unit``."""

    def __init__(self) -> None:
        self._started: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            try:
                tier = tier_of(marks, {*getattr(item, "fixturenames", ())})
            except ValueError as error:
                raise pytest.UsageError(f"{item.nodeid}: {error}") from error
            item.add_marker(tier)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._started.clear()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield
        if self._started and item.get_closest_marker("unit"):
            pytest.fail(
                f"a unit test started {', '.join(self._started)}: mark it as ranks (processes and "
                "process groups) or cluster (namespaces, clusters, launchers)",
                pytrace=False,
            )

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the processes that Python tells its audit hooks of."""
        if event in _EVENTS:
            place = _EVENTS[event]
            program = event if place is None else str(arguments[place])
            if program not in _QUICK:
                self._started.append(program)

    def watch(self, owner: Any, name: str) -> None:
        """Note each call of ``owner.name`` from now on."""
        called: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._started.append(name)
            return called(*args, **kwargs)

        setattr(owner, name, call)

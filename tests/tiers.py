"""Tiers of tests: ``unit``, ``ranks``, ``cluster`` and ``system``, each test in one.

A test's tier follows from the fixtures that it uses (``FIXTURES``) and from where it is
(``PLACES``), or is marked where those do not show it: ``@pytest.mark.ranks``. All others are unit
tests, and are held to it: one that starts a process or a process group fails, so that none takes
the quick tier's time unnoticed.

Of a test on ranks or clusters that has parameters, the first row shows that the parts work
together. The other rows are ``drawn``, unless the test is marked with ``@pytest.mark.always``. So
are a test of a minute that is marked with ``@pytest.mark.drawn``, and all tests of the files of
``DRAWN``. ``make test`` runs all tiers but the last and nothing that is drawn. CI runs all tiers,
and for each commit a third of what is drawn, of tests with many rows some eight: ``--drawn`` draws
them from the commit's hash. Without that option pytest runs all.

Where processes share the files, the longest come first: one that takes up a file of minutes while
the others have none left makes `make test` that much longer.
"""

import functools
import multiprocessing.process
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

TIERS = {
    "unit": "one process, no process group",
    "ranks": "processes: rank pools, process groups, commands",
    "cluster": "network namespaces, emulated clusters",
    "system": "pages, examples, packaging, launchers, rented nodes, daemons, whole cells,"
    " kills and signals, and what is published computed anew",
}
#: The tier of tests that use a fixture; the highest counts.
FIXTURES = {
    "ranks": "ranks",
    "pools": "ranks",
    "apart": "ranks",
    "privileged": "cluster",
    "committed": "system",
}
#: The tier of tests in a folder or file, unless they are marked; the highest counts.
#: Whole cells, and trainings of sibling systems, show on real nodes and ranks what cheaper tests
#: show by parts: ledgers and closed forms, rules and updates, objectives, publications; walks show
#: of all settings at once what tests of each do. Tests that compute committed fits and searches
#: again take seconds each.
PLACES = {
    "tests/examples": "system",
    "tests/fcdp/cuda": "system",
    "tests/fcdp/test_walk.py": "system",
    "tests/launch": "system",
    "tests/experiments/clusters": "cluster",
    "tests/experiments/tracking": "system",
    "tests/experiments/worker/test_checkpoint.py": "system",
    "tests/experiments/worker/test_groups.py": "system",
    "tests/experiments/worker/test_luwu.py": "system",
    "tests/experiments/worker/test_objectives.py": "system",
    "tests/experiments/worker/test_pipeline.py": "system",
    "tests/experiments/worker/test_rollout.py": "system",
    "tests/experiments/worker/test_worker.py": "system",
    "tests/clients": "system",
    "tests/docs": "system",
    "tests/packaging": "system",
    "tests/test_readme.py": "system",
    "tests/analysis/load/test_bound.py": "system",
    "tests/analysis/load/test_fuyou.py": "system",
    "tests/analysis/paper/test_region.py": "system",
    "tests/analysis/report/test_reproduction.py": "system",
    "tests/analysis/report/test_run.py": "system",
    "tests/baselines/test_adding_to_a_copy.py": "system",
    "tests/baselines/test_checkpoint.py": "system",
    "tests/baselines/test_configurations.py": "system",
    "tests/baselines/co2/test_diloco.py": "system",
    "tests/baselines/co2/test_train.py": "system",
    "tests/baselines/cyclic/test_interleaved.py": "system",
    "tests/baselines/cyclic/test_ring.py": "system",
    "tests/baselines/cyclic/test_synchronous.py": "system",
    "tests/baselines/fuyou/test_crash.py": "system",
    "tests/baselines/fuyou/test_exact.py": "system",
    "tests/baselines/luwu/test_ends.py": "system",
    "tests/experiments/matrix/test_paper_suite.py": "system",
    "tests/experiments/test_pins.py": "system",
    "tests/experiments/clusters/test_rented.py": "system",
    "tests/experiments/clusters/test_slurm.py": "system",
    "tests/experiments/clusters/test_ssh.py": "system",
    "tests/simulation/imitated/test_agreement.py": "system",
    "tests/simulation/imitated/test_study.py": "system",
    "tests/simulation/test_compute_fit.py": "system",
}
#: Files of minutes: daemons, other people's trainers, whole trainings.
DRAWN = {
    "tests/clients/test_clients.py",
    "tests/examples/test_train.py",
    "tests/experiments/clusters/test_rented.py",
    "tests/experiments/clusters/test_slurm.py",
    "tests/experiments/clusters/test_ssh.py",
    "tests/experiments/test_pins.py",
    "tests/experiments/tracking/test_whole.py",
    "tests/experiments/worker/test_checkpoint.py",
    "tests/experiments/worker/test_rollout.py",
    "tests/packaging/test_gpu_cluster.py",
}
#: Seconds on two cores that other work used as well; only their order matters.
SECONDS = {
    "tests/clients/test_clients.py": 300,
    "tests/experiments/clusters/test_slurm.py": 190,
    "tests/examples/test_train.py": 180,
    "tests/packaging/test_gpu_cluster.py": 140,
    "tests/experiments/clusters/test_ssh.py": 110,
    "tests/baselines/pipeline/test_train.py": 100,
    "tests/experiments/worker/test_worker.py": 95,
    "tests/fcdp/test_walk.py": 95,
    "tests/fcdp/test_streams.py": 85,
    "tests/experiments/test_pins.py": 85,
    "tests/experiments/clusters/test_rented.py": 70,
    "tests/experiments/worker/test_pipeline.py": 65,
    "tests/experiments/worker/test_checkpoint.py": 50,
    "tests/packaging/test_wheel.py": 45,
    "tests/analysis/report/test_reproduction.py": 40,
    "tests/experiments/worker/test_objectives.py": 40,
    "tests/experiments/tracking/test_whole.py": 40,
    "tests/simulation/imitated/test_pipelines.py": 30,
}
#: Commits of which one runs what is drawn, and rows of a test that a commit draws at most, about.
_COMMITS, _ROWS = 3, 8
#: Seconds of a usual test.
USUAL = {"system": 3.0, "cluster": 3.0, "ranks": 1.0, "unit": 0.1}
#: Audit events of what starts a process, and where in their arguments the program is.
_EVENTS = {"subprocess.Popen": 0, "os.posix_spawn": 0, "os.system": 0, "os.fork": None}
#: Programs that libraries ask for facts, in milliseconds: which commit, which libraries. DeepSpeed
#: asks the compiler, in whichever test imports it first.
_QUICK = frozenset({"file", "gcc", "git", "ldconfig", "/sbin/ldconfig", "uname"})


def tier_of(marks: set[str], fixtures: set[str], file: str = "tests") -> str:
    """The tier of a test with these markers and fixtures, in a file of the repository.

    Raises ``ValueError`` for one that is marked with several tiers, or with a lower one than a
    fixture that it uses.
    """
    marked = [tier for tier in TIERS if tier in marks]
    if len(marked) > 1:
        raise ValueError(f"marked as {' and '.join(marked)}: a test is in one tier")
    used = _highest(FIXTURES.get(name) for name in fixtures)
    if marked and _highest([*marked, used]) != marked[0]:
        raise ValueError(f"marked as {marked[0]}, and uses a fixture of {used}")
    placed = (tier for place, tier in PLACES.items() if f"{file}/".startswith(f"{place}/"))
    return marked[0] if marked else _highest([used, *placed])


def _highest(tiers: Iterable[str | None]) -> str:
    order = [*TIERS]
    return order[max((order.index(tier) for tier in tiers if tier), default=0)]


def starts_processes(marks: set[str], fixtures: set[str]) -> bool:
    """Whether marks or fixtures say so; the place of a test does not."""
    by_fixtures = {FIXTURES.get(name) for name in fixtures}
    return bool({"ranks", "cluster"} & (marks | by_fixtures))


def further_rows(rows: Iterable[str]) -> set[str]:
    """The rows after the first of each test, by the names that pytest has for them."""
    first: dict[str, str] = {}
    return {row for row in rows if first.setdefault(_test(row), row) != row}


def _test(row: str) -> str:
    return row.partition("[")[0]


def draws(seed: str, row: str, rows: int) -> bool:
    """Whether ``seed`` draws a row, by the name that pytest has for it, of a test of so many.

    ``rows`` are those that can be drawn.
    """
    return zlib.crc32(f"{seed} {row}".encode()) % max(_COMMITS, rows // _ROWS) == 0


def leave_out(
    config: pytest.Config, items: list[pytest.Item], left_out: Sequence[pytest.Item]
) -> None:
    """Deselect collected tests."""
    config.hook.pytest_deselected(items=left_out)
    gone = {*left_out}
    items[:] = [item for item in items if item not in gone]


def longest_first(tests: Sequence[tuple[str, str]]) -> list[str]:
    """Files in the order to run them in, of tests that are pairs of file and tier."""
    usual: dict[str, float] = defaultdict(float)
    for file, tier in tests:
        usual[file] += USUAL[tier]
    return sorted(usual, key=lambda file: -SECONDS.get(file, usual[file]))


def install(config: pytest.Config) -> None:
    """Register the tiers' markers, and the plugin that marks and watches tests."""
    for tier, has in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {has}")
    config.addinivalue_line("markers", "drawn: CI runs it for some commits, by --drawn")
    config.addinivalue_line("markers", "accelerator: the fake one of tests/fcdp/accelerator")
    config.addinivalue_line("markers", "always: all rows of a test on ranks run, none is drawn")
    tiers = _Tiers()
    config.pluginmanager.register(tiers)
    sys.addaudithook(tiers.audit)
    tiers.watch(multiprocessing.process.BaseProcess, "start")
    tiers.watch(dist, "init_process_group")


class _Tiers:
    """Marks each collected test with its tier, and watches those of the tier ``unit``."""

    def __init__(self) -> None:
        self._started: list[str] = []  # programs and groups that the running test started

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        tests, several = [], []
        for item in items:
            marks = {mark.name for mark in item.iter_markers()}
            fixtures = {*getattr(item, "fixturenames", ())}
            file = item.nodeid.partition("::")[0]
            try:
                tier = tier_of(marks, fixtures, file)
            except ValueError as error:
                raise pytest.UsageError(f"{item.nodeid}: {error}") from error
            item.add_marker(tier)
            tests.append((file, tier))
            # Those on the accelerator are sampled by tests/fcdp/conftest.py.
            if starts_processes(marks, fixtures) and not {"always", "accelerator"} & marks:
                several.append(item.nodeid)
        others = further_rows(several)
        for item in items:
            if item.nodeid in others or item.nodeid.partition("::")[0] in DRAWN:
                item.add_marker("drawn")
        if seed := config.getoption("--drawn"):
            drawn = [item for item in items if item.get_closest_marker("drawn")]
            rows = Counter(_test(item.nodeid) for item in drawn)
            left_out = [
                item for item in drawn if not draws(seed, item.nodeid, rows[_test(item.nodeid)])
            ]
            leave_out(config, items, left_out)
        if hasattr(config, "workerinput"):  # one of xdist's processes
            place = {file: index for index, file in enumerate(longest_first(tests))}
            items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])

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

"""A process of its own for the accelerator, which PyTorch does not forget again.

What tests send to ranks, they send to ranks on the accelerator too (``ALSO``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fcdp.on_streams import OnStreams
from tests.ranks import Pools

#: Files whose tests run on the accelerator, too: the first of each file, all with ``--exhaustive``.
ALSO = (
    "upstream.",
    "test_accumulate",
    "test_api",
    "test_hooks",
    "test_parity",
    "test_passes",
    "test_peft",
    "test_precision",
    "test_replicas",
    "test_staleness",
)
#: Why others of these files cannot run there, by the test's name.
NOT_THERE: dict[str, str] = {}


class Here:
    """In place of a pool: this process, which was forked for its tests and ends with them."""

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        assert world_size == 1, "ranks of the accelerator are threads"
        return [function(*args)]


@pytest.fixture(scope="package")
def apart() -> Iterator[Pools | Here]:
    if "FCDP_TESTS_ARE_APART" in os.environ:  # scripts/mutants
        yield Here()
        return
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, ranks: Pools) -> Pools:
    """Processes with CPUs, or threads with accelerators."""
    if getattr(request, "param", "cpu") == "cpu":
        return ranks
    return OnStreams(request.getfixturevalue("apart"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    file = metafunc.module.__name__.removeprefix("tests.fcdp.")
    if "ranks" in metafunc.fixturenames and file.startswith(ALSO):
        why = NOT_THERE.get(metafunc.function.__name__)
        marks = [pytest.mark.skip(why)] if why else []
        there = pytest.param("accelerator", id="accelerator", marks=marks)
        cpu = pytest.param("cpu", id=pytest.HIDDEN_PARAM)
        metafunc.parametrize("ranks", [cpu, there], indirect=True)

"""A process of its own for the accelerator, which PyTorch does not forget again.

What tests send to ranks, they send to ranks on the accelerator too (``ALSO``).
"""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(scope="package")
def apart() -> Iterator[Pools]:
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

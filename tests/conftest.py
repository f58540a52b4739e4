"""Fixtures for all tests."""

import gc
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
from hypothesis import settings

from experiments.clusters.privileges import missing_capabilities
from tests import tiers
from tests.ranks import Pools, start_fork_server

# How long an example takes says something about the machine only.
settings.register_profile("fcdp", deadline=None)
settings.load_profile("fcdp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="whole products, not samples")
    parser.addoption("--drawn", metavar="SEED", help="of what is marked as drawn, what SEED draws")
    parser.addoption("--keep", metavar="DIR", help="a folder for the trace of a step on a GPU")


def pytest_configure(config: pytest.Config) -> None:
    tiers.install(config)
    # A shell has background jobs ignore it. What the tests start would inherit that, and bash
    # could not even catch it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported by now: no test frees a million such objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Rank processes that all files share.

    It has a name of its own, as pytest ends a fixture with each file where a test that asks for it
    by its name has parameters of that name: those of ``tests/fcdp/conftest.py`` do.
    """
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def ranks(pools: Pools) -> Pools:
    """Shared rank processes: ``ranks.run(world_size, function, *args)``."""
    return pools


@pytest.fixture(scope="session")
def privileged() -> None:
    """Skip where network namespaces cannot be made directly."""
    if missing := missing_capabilities():
        pytest.skip(f"needs {' and '.join(missing)}: run as root")
    start_fork_server()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """A fork server of one test file, with the imports and the environment of its cluster.

    The one that other files share cannot be ended while ranks that it forked live on.
    """
    server = forkserver.ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, name, getattr(server, name))
        yield
        server._stop()  # type: ignore[attr-defined]

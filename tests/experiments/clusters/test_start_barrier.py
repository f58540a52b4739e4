"""Ranks that have set up wait until the link between nodes is limited."""

import threading
from collections.abc import Iterator
from multiprocessing import TimeoutError
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

from experiments.clusters import start_barrier
from experiments.clusters.start_barrier import limiting

#: Longer than anything here takes; nothing waits for it unless a test is about to fail.
ENDS_WITHIN_S = 30.0
#: How long a limit takes here: time enough for a rank that does not wait to give itself away.
LIMITING_S = 0.2

SHAPED = {"rate_bits_per_s": 10_000_000}


@pytest.fixture
def rank() -> Iterator[ThreadPool]:
    """Rank 0, a thread that calls the functions which it gets."""
    with ThreadPool(1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    assert "start-barrier" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_waits_until_the_link_is_limited(tmp_path: Path, rank: ThreadPool) -> None:
    begun, limited = threading.Event(), threading.Event()

    def limit() -> dict[str, Any]:
        begun.set()
        assert limited.wait(ENDS_WITHIN_S)
        return SHAPED

    with limiting(tmp_path, limit) as network:
        passed = rank.apply_async(start_barrier.wait, (tmp_path,))
        assert begun.wait(ENDS_WITHIN_S)
        with pytest.raises(TimeoutError):
            passed.get(LIMITING_S)
        limited.set()
        passed.get(ENDS_WITHIN_S)
    assert network == SHAPED


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("first line\nsecond line"), "first line\nsecond line"),
        (ValueError("Ω" * 2**18 + " end"), "Ω end"),
        (AssertionError(), "AssertionError"),
    ],
    ids=["lines", "much text", "no text"],
)
def test_what_the_limit_raises_reaches_the_rank(
    tmp_path: Path, rank: ThreadPool, error: Exception, text: str
) -> None:
    def limit() -> dict[str, Any]:
        raise error

    with limiting(tmp_path, limit) as network:
        passed = rank.apply_async(start_barrier.wait, (tmp_path,))
        with pytest.raises(RuntimeError) as caught:
            passed.get(ENDS_WITHIN_S)
    assert str(caught.value).startswith("the link between nodes could not be limited: ")
    assert text in str(caught.value)
    assert network == {}


@pytest.mark.timeout(ENDS_WITHIN_S)
def test_a_launch_that_ends_before_it_is_ready_does_not_hang(tmp_path: Path) -> None:
    with limiting(tmp_path, lambda: pytest.fail("nobody is ready")) as network:
        pass
    assert network == {}
    assert list(tmp_path.iterdir()) == []


def test_a_launch_that_ends_while_the_link_is_limited_leaves_no_limit_under_way(
    tmp_path: Path, rank: ThreadPool
) -> None:
    """Otherwise it would come over the next launch's set-up."""
    begun, finished = threading.Event(), threading.Event()

    def limit() -> dict[str, Any]:
        begun.set()
        finished.wait(LIMITING_S)  # nobody sets it before: the time passes
        finished.set()
        return SHAPED

    with limiting(tmp_path, limit):
        rank.apply_async(start_barrier.wait, (tmp_path,))
        assert begun.wait(ENDS_WITHIN_S)
    assert finished.is_set()

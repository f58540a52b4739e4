"""What is announced of an error, and which errors are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from fcdp import failure
from fcdp.failure import Announcement, Board, Failures, RankFailed
from tests.fcdp.failures.made_up import over_nccl


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative\n  rows")
        return x


def _announced(failures: Failures, x: torch.Tensor) -> Announcement | None:
    """Announcement that a forward of ``x`` makes."""
    module = _Fails()
    module.register_forward_pre_hook(lambda module, args: failures.begins())
    module.register_forward_hook(
        lambda module, args, output: failures.forward_ends(), always_call=True
    )
    with contextlib.suppress(ValueError):
        module(x)
    return Board("hook").read("0")


def test_a_forward_that_raises_announces_its_error(playing: Callable[[int], None]) -> None:
    failures, _ = over_nccl("hook")
    assert _announced(failures, -torch.ones(2)) == ("rank 0 failed: ValueError: negative rows", 0)


def test_an_error_that_the_caller_is_handling_is_not_the_forwards(
    playing: Callable[[int], None],
) -> None:
    failures, _ = over_nccl("hook")
    try:
        raise KeyError("batch")
    except KeyError:
        assert _announced(failures, torch.ones(2)) is None


def test_only_the_transports_errors_are_explained(playing: Callable[[int], None]) -> None:
    failures, backend = over_nccl()
    for error in (ValueError("a"), torch.OutOfMemoryError("b"), KeyboardInterrupt()):
        with pytest.raises(type(error)), failures.waiting():
            raise error
    assert backend.calls == []
    with (
        pytest.raises(RankFailed, match="one was killed .* RuntimeError: Connection") as caught,
        failures.waiting(),
    ):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value.__cause__) == "Connection closed by peer"
    assert "abort" in backend.calls, "for whoever waits for this rank"


def test_a_message_stays_short(playing: Callable[[int], None]) -> None:
    failures, _ = over_nccl("long")
    failures.begins()
    failures.announce(ValueError("x" * 10_000))
    announced = Board("long").read("0")
    assert len(announced.text) < failure.TEXT_LIMIT + 20


def test_the_first_text_and_the_fewest_exchanges_stay(playing: Callable[[int], None]) -> None:
    shared = Board("kept")
    assert shared.put("1", Announcement("first", 5)) == "first"
    assert shared.put("1", Announcement("second", 3)) == "first"
    assert shared.put("1", Announcement("third", 4)) == "first"
    assert shared.read("1") == ("first", 3)
    assert shared.read("2") is None

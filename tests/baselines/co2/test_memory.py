"""Outer state in host memory: what it takes, and that the host reads nothing under way."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from baselines.co2.train import Memory
from tests.baselines.co2.workers import ALL, ON_HOST, Training, batches, flat, made
from tests.ranks import on_ranks


class Lazy(TorchDispatchMode):
    """A device that makes copies as late as it may: when computing goes on, or the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[Callable[[], object]] = []
        self.waits = 0

    def current_stream(self) -> Lazy:
        return self

    def synchronize(self) -> None:
        self.waits += 1
        self.catch_up()

    def catch_up(self) -> None:
        queued, self._queued = self._queued, []
        with _disable_current_modes():
            for copy in queued:
                copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._foreach_copy_.default:
            return func(*args, **(kwargs or {}))
        self._queued.append(lambda: func(*args))
        return None


@on_ranks(1)
def test_the_host_reads_nothing_before_it_has_landed() -> None:
    plain = _trained(ALL, None)
    lazy = Lazy()
    assert all(map(torch.equal, plain, _trained(ON_HOST, lazy)))
    assert lazy.waits == 4, "once a round"
    with mock.patch.object(Memory, "land"):
        unwaited = _trained(ON_HOST, Lazy())
    assert not all(map(torch.equal, plain, unwaited))


def _trained(settings: Any, lazy: Lazy | None) -> list[torch.Tensor]:
    """The parameters after each of four rounds, with copies made at once or by ``lazy``."""
    trained, workers = made(Training(settings))
    data = batches(0)
    if lazy is not None:
        workers._fragments[0].memory._device = SimpleNamespace(type="stand-in")  # type: ignore[assignment]
    by_round = []
    with mock.patch("torch.get_device_module", return_value=lazy):
        for step in range(12):
            ends_round = step % 3 == 2
            with lazy if lazy and ends_round else contextlib.nullcontext():
                workers.step([next(data)])
            if lazy is not None:
                lazy.catch_up()  # the next forward comes after what is queued
            if ends_round:
                by_round.append(flat(trained))
    return by_round


@on_ranks(1)
def test_host_memory_of_the_outer_state_is_a_metric() -> None:
    _, workers = made(Training(ON_HOST))
    # 78 parameters, thrice.
    assert workers.take_metrics() == {"outer_host_bytes": 3 * mmap.PAGESIZE}

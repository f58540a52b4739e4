"""A stand-in for an accelerator's streams: copies run in any order that events allow.

Copies are noted while the code under test issues them, and run afterwards in an order drawn by
chance among all that stream order and events permit. A missing event shows as wrong data in some
order, as it would on some day on a GPU.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(eq=False)
class Operation:
    run: Callable[[], object]
    after: list[Operation]
    done: bool = False


@dataclass(eq=False)
class Stream:
    latest: Operation | None = None
    awaited: list[Operation] = field(default_factory=list)

    def record_event(self) -> Operation | None:
        return self.latest

    def wait_event(self, event: Operation | None) -> None:
        if event is not None:
            self.awaited.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.latest)


class Accelerator:
    """What ``torch.get_device_module`` returns, and the operations that were issued."""

    Stream = Stream

    def __init__(self) -> None:
        self._current = Stream()
        self._operations: list[Operation] = []

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def issue(self, run: Callable[[], object]) -> None:
        stream = self._current
        after = [*stream.awaited, *([stream.latest] if stream.latest else [])]
        stream.latest, stream.awaited = Operation(run, after), []
        self._operations.append(stream.latest)

    def run_in_some_order(self, chance: random.Random) -> None:
        waiting = self._operations
        while waiting:
            ready = [each for each in waiting if all(other.done for other in each.after)]
            chosen = chance.choice(ready)
            chosen.run()
            chosen.done = True
            waiting.remove(chosen)

    @contextlib.contextmanager
    def in_place_of_torchs(self) -> Iterator[None]:
        """Memory of the stand-in is ordinary memory; every copy is noted instead of made."""
        empty = torch.empty

        def on_the_host(*args: Any, device: object = None, **kwargs: Any) -> torch.Tensor:
            return empty(*args, **kwargs)

        with (
            mock.patch("torch.get_device_module", return_value=self),
            mock.patch("torch.empty", on_the_host),
            _Noting(self),
        ):
            yield


class _Noting(TorchDispatchMode):
    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source, *_ = args
        self._accelerator.issue(lambda: func(target, source))
        return target

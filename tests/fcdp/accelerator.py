"""A stand-in for an accelerator: what is queued runs in any order that streams and events allow.

Copies and collectives are noted while the code under test issues them, and run afterwards in an
order drawn by chance among all that stream order and events permit. A missing event shows as wrong
data in some order, as it would on some day on a GPU. Memory is given out as a caching allocator
does: what is let go on the host may be given out anew, to the stream that it was allocated on, at
once, whether the device has caught up or not.
"""

from __future__ import annotations

import contextlib
import math
import random
import weakref
from collections import defaultdict
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

    def query(self) -> bool:
        """Whether the host sees the event: never, as it may run ahead of everything."""
        return False


@dataclass(eq=False)
class Stream:
    priority: int = 0
    latest: Operation | None = None
    awaited: list[Operation] = field(default_factory=list)

    def record_event(self) -> Operation | None:
        # Nothing may be queued after what is awaited yet: the event comes after both.
        if self.awaited:
            self.queue(lambda: None)
        return self.latest

    def wait_event(self, event: Operation | None) -> None:
        if event is not None:
            self.awaited.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def queue(self, run: Callable[[], object]) -> Operation:
        after = [*self.awaited, *([self.latest] if self.latest else [])]
        self.latest, self.awaited = Operation(run, after), []
        return self.latest


class Accelerator:
    """What ``torch.get_device_module`` returns, and the operations that were issued."""

    Stream = Stream

    def __init__(self) -> None:
        self.compute = Stream()
        self._current = self.compute
        self._operations: list[Operation] = []
        #: Memory that was let go, by stream and size.
        self._free: dict[tuple[Stream, int], list[torch.UntypedStorage]] = defaultdict(list)
        self.allocated_bytes = 0

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def issue(self, run: Callable[[], object]) -> None:
        # Events note themselves as operations of their stream.
        self._note(self._current.queue(run))

    def allocate(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """Give out memory that was let go on the current stream, or new memory."""
        stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        key = (self._current, math.prod(shape) * dtype.itemsize)
        if self._free[key]:
            storage = self._free[key].pop()
        else:
            storage = torch.UntypedStorage(key[1])
            self.allocated_bytes += key[1]
        given = _alias(storage, 0, shape, stride, dtype)
        weakref.finalize(given, self._free[key].append, storage)
        return given

    def run_in_some_order(self, chance: random.Random) -> None:
        waiting = _with_events(self._operations)
        while waiting:
            ready = [each for each in waiting if all(other.done for other in each.after)]
            chosen = chance.choice(ready)
            chosen.run()
            chosen.done = True
            waiting.remove(chosen)

    def _note(self, operation: Operation) -> None:
        self._operations.append(operation)

    @contextlib.contextmanager
    def in_place_of_torchs(self) -> Iterator[None]:
        """Every copy is noted instead of made; ``torch.empty`` gives out the stand-in's memory."""

        def empty(*shape: Any, dtype: torch.dtype = torch.float32, **_: object) -> torch.Tensor:
            sizes = shape[0] if isinstance(shape[0], (tuple, list)) else shape
            return self.allocate(tuple(sizes), dtype)

        with (
            mock.patch("torch.get_device_module", return_value=self),
            mock.patch("torch.empty", empty),
            _Noting(self),
        ):
            yield


def _alias(storage: Any, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that knows of no other tensor over it."""
    return torch.tensor([], dtype=dtype).set_(storage, offset, tuple(shape), tuple(stride))


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """What a queued operation holds: the memory, and not the tensor whose end frees it."""
    storage = tensor.untyped_storage()
    return _alias(storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _with_events(operations: list[Operation]) -> list[Operation]:
    """All operations, and the events among what they wait for."""
    found: dict[int, Operation] = {}
    pending = [*operations]
    while pending:
        operation = pending.pop()
        if id(operation) not in found:
            found[id(operation)] = operation
            pending += operation.after
    return [*found.values()]


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
        to, of = alias(target), alias(source)
        self._accelerator.issue(lambda: func(to, of))
        return target

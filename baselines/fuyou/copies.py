"""Copies between host memory and the device, in the order in which they may be read.

On the CPU a copy has ended when it returns. On CUDA copies have streams of their own; that has not
been run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fcdp.streams import Streams


class Copies:
    """Copies of one device, counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = Streams(device)
        #: Bytes so far; and of the CPU's, seconds.
        self.nbytes = 0
        self.seconds = 0.0
        #: Seconds that the device has waited for parameters, activations and room for gradients.
        self.waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's time as the device's that waits."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def out(self, host: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Event]:
        """Copy tensors of the device, which may be let go; what says when they have landed."""
        begin = time.perf_counter()
        stream = self._streams.copies_out
        stream.wait_stream(self._streams.current())
        with self._streams.on(stream):
            for target, source in zip(host, given, strict=True):
                target.copy_(source, non_blocking=True)
                if not self._streams.on_host:
                    source.record_stream(stream)
        self._count(given, begin)
        return [] if self._streams.on_host else [stream.record_event()]

    def into(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy to the device, before what the calling thread's stream does next."""
        begin = time.perf_counter()
        stream = self._streams.copies_in
        stream.wait_stream(self._streams.current())
        with self._streams.on(stream):
            target.copy_(host, non_blocking=True)
        self._streams.current().wait_stream(stream)
        self._count([host], begin)

    def load(self, target: torch.Tensor, host: torch.Tensor, unused: Sequence[Any]) -> None:
        """Copy to the device on another thread, once it is unused there; return when it is done."""
        for event in unused:
            event.synchronize()
        stream = self._streams.copies_in
        with self._streams.on(stream):
            target.copy_(host, non_blocking=True)
        if not self._streams.on_host:
            stream.synchronize()

    def used(self) -> list[torch.Event]:
        """An event at the end of the calling thread's operations so far."""
        return [] if self._streams.on_host else [self._streams.current().record_event()]

    def _count(self, moved: Sequence[torch.Tensor], begin: float) -> None:
        self.nbytes += sum(tensor.nbytes for tensor in moved)
        self.seconds += time.perf_counter() - begin

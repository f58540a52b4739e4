"""Where the outer state and the snapshot lie: on the device, or in an arena of the host."""

from __future__ import annotations

from typing import Any

import torch

from baselines.settings import OuterPlace
from fcdp.cache.arena import Arena, aligned

_ITEM = torch.float32.itemsize


class Memory:
    """Three flat float32 tensors of one rank: ``start``, ``momentum`` and ``snapshot``.

    Who may touch what when, where they lie on the host of an accelerator:

    - copies to and from parameters are queued on the computing stream, so that they come after the
      steps before them and before those after; nothing is queued on any other stream;
    - the host reads or writes ``start`` and ``snapshot`` only once ``land`` has returned, with no
      copy queued since: a round ends with a copy to ``snapshot``, ``land``, all of the host's work,
      and a copy from ``start``, which the next round's ``land`` waits for;
    - ``momentum`` is the host's alone, and ``snapshot`` the all-reduce's while one is under way.

    On the device all of it is queued on the computing stream, and there is nothing to wait for.
    """

    def __init__(self, place: OuterPlace, numel: int, scalars: int, device: torch.device) -> None:
        """``numel`` elements each, and so many more at the snapshot's end."""
        #: What of the host's memory is taken, page-locked on CUDA; 0 on the device.
        self.host_bytes = 0
        self._device = device
        sizes = [numel, numel, numel + scalars]
        if place == "device":
            tensors = [torch.zeros(size, device=device) for size in sizes]
        else:
            self.host_bytes = sum(aligned(size * _ITEM) for size in sizes)
            # Its pages are zero at first, as the kernel gives them.
            self._arena = Arena(self.host_bytes, device)
            tensors = [self._arena.take(size * _ITEM).view(torch.float32) for size in sizes]
        self.start, self.momentum, self.snapshot = tensors

    def land(self) -> None:
        """Wait until the copies that are queued have been made, if the host is to see them."""
        if self.host_bytes and self._device.type != "cpu":
            backend: Any = torch.get_device_module(self._device)
            backend.current_stream().synchronize()

"""Partial gradients: a unit's gradients summed inside the node, until the last micro-batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch

from fcdp.arena import Arena, aligned
from fcdp.counts import Ledger
from fcdp.topology import Topology
from fcdp.unit import Unit

#: Where the partial gradients of ``fcdp.accumulate`` wait.
PartialsPlace = Literal["device", "host"]


class PartialGradients(ABC):
    """The partial gradients of one unit: (nodes · s) per rank, in fp32 or wider.

    That is 4 bytes for each of n/W = 1/L of the unit's elements, whatever the reduce dtype: as
    wide as FSDP2 keeps accumulated gradients. Everything runs in the order of the current stream,
    which is FSDP2's one stream of reductions.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sum: torch.Tensor | None = None
        #: Micro-batches whose gradients are in the sum.
        self.count = 0

    @property
    def numel(self) -> int:
        """Elements that wait; 0 if nothing does."""
        return 0 if self._sum is None else self._sum.numel()

    def add(self, partial: torch.Tensor, *, owned: bool) -> None:
        """Add one micro-batch's.

        ``owned``: nobody else will use its memory, so that the first need not be copied.
        """
        self._add(partial, owned)
        self.count += 1

    def take(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum with ``partial`` added, in fp32 or wider; nothing waits afterwards."""
        total = self._read(partial.device).add_(partial)
        self.discard()
        return total

    def discard(self) -> None:
        """Forget the sum."""
        self._sum = None
        self.count = 0

    @abstractmethod
    def _add(self, partial: torch.Tensor, owned: bool) -> None: ...

    @abstractmethod
    def _read(self, device: torch.device) -> torch.Tensor:
        """Return the sum on ``device``, where it may be changed."""


class OnDevice(PartialGradients):
    """In the device memory that the gradients are made in."""

    def discard(self) -> None:
        if self._sum is not None:
            self._ledger.hold(-self._sum.nbytes)
        super().discard()

    def _add(self, partial: torch.Tensor, owned: bool) -> None:
        if self._sum is None:
            self._sum = partial.to(_wide(partial.dtype), copy=not owned)
            self._ledger.hold(self._sum.nbytes)
        else:
            self._sum += partial

    def _read(self, device: torch.device) -> torch.Tensor:
        assert self._sum is not None
        return self._sum


class OnHost(PartialGradients):
    """In the host arena: the device holds one unit's sum at a time, while it is added to.

    Each micro-batch but the first copies a sum in and out again.
    """

    def __init__(self, memory: torch.Tensor, ledger: Ledger) -> None:
        """``memory``: uint8, room for the unit's widest sum."""
        super().__init__(ledger)
        self._memory = memory

    def _add(self, partial: torch.Tensor, owned: bool) -> None:
        dtype = _wide(partial.dtype)
        if self._sum is None:
            total = partial
            if partial.numel() * dtype.itemsize > self._memory.numel():
                raise RuntimeError(
                    f"partial gradients of {partial.dtype}: the host memory for them was planned "
                    "for another dtype; change it before FCDP is set up"
                )
            self._sum = self._memory[: partial.numel() * dtype.itemsize].view(dtype)
        else:
            total = self._read(partial.device).add_(partial)
        self._sum.copy_(total, non_blocking=True)
        self._ledger.add("device_to_host", "reduce", self._sum.nbytes)

    def _read(self, device: torch.device) -> torch.Tensor:
        assert self._sum is not None
        self._ledger.add("host_to_device", "reduce", self._sum.nbytes)
        return self._sum.to(device, non_blocking=True, copy=True)


class Partials:
    """Makes the partial gradients of all units; on the host, in one arena sized to them."""

    def __init__(
        self,
        place: PartialsPlace,
        units: Sequence[Unit],
        topology: Topology,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self._ledger = ledger
        ledger.host_partials_bytes = planned_bytes(place, units, topology)
        self._arena = Arena(ledger.host_partials_bytes, device)
        sizes = _sizes(place, units, topology)
        self._memory = {unit: self._arena.take(size) for unit, size in sizes.items()}

    def of(self, unit: Unit) -> PartialGradients:
        if unit not in self._memory:
            return OnDevice(self._ledger)
        return OnHost(self._memory[unit], self._ledger)


def planned_bytes(place: PartialsPlace, units: Sequence[Unit], topology: Topology) -> int:
    """Bytes of host memory that one rank's partial gradients take."""
    return sum(map(aligned, _sizes(place, units, topology).values()))


def _sizes(place: PartialsPlace, units: Sequence[Unit], topology: Topology) -> dict[Unit, int]:
    if place == "device":
        return {}
    return {unit: _widest(unit, topology) for unit in units if unit.trainable}


def _widest(unit: Unit, topology: Topology) -> int:
    itemsize = max(_wide(param.dtype).itemsize for param in unit.params)
    return topology.nodes * unit.shard_numel * itemsize


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

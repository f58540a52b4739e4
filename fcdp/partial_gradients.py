"""Partial gradients: a unit's gradients summed inside the node, until the last micro-batch.

Meanwhile ``.grad`` holds a stand-in (``Waiting``): there is nothing to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_leaves, tree_map_only

from fcdp.arena import Arena, aligned
from fcdp.counts import Ledger
from fcdp.streams import Access, Slices, Streams
from fcdp.unit import Unit

_aten = torch.ops.aten


@dataclass(eq=False)
class HostSum:
    """Host memory for one unit's sum, which is added to on the device.

    Copies run on streams of their own, by way of staging buffers that all units share: while one
    unit's sum goes out, the next one's comes in. The memory of a staging buffer is ``sums_in``'s,
    in whose order it is free.
    """

    #: uint8, with room for the unit's widest sum.
    memory: torch.Tensor
    streams: Streams
    staging: Slices
    access: Access = field(default_factory=Access)

    def add(self, total: torch.Tensor, partial: torch.Tensor, *, first: bool) -> None:
        """Add ``partial`` to ``total``, a view of the memory, or begin it with the ``first``."""
        streams, current = self.streams, self.streams.current()
        stage = self.staging.take(1, total.numel(), total.dtype, own_row=None)
        staged = stage.memory.view(-1)
        if first:
            current.wait_stream(streams.sums_in)  # in whose order the memory is free
            staged.copy_(partial)
        else:
            self._copy_in(total, staged, stage.access)
            stage.access.freed_for(current)
            staged.add_(partial)
        stage.access.note_write(current)
        streams.copy([total], [staged], streams.sums_out, reads=stage.access, writes=self.access)
        self.staging.release(stage)

    def read(self, total: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``total`` on the device, in the current stream's order."""
        current = self.streams.current()
        stage = self.staging.take(1, total.numel(), total.dtype, own_row=None)
        staged = stage.memory.view(-1)
        self._copy_in(total, staged, stage.access)
        stage.access.written_for(current)
        copy = staged.clone()
        stage.access.note_read(current)
        self.staging.release(stage)
        return copy

    def _copy_in(self, total: torch.Tensor, staged: torch.Tensor, access: Access) -> None:
        streams = self.streams
        streams.copy([staged], [total], streams.sums_in, reads=self.access, writes=access)


@dataclass(eq=False)
class PartialGradients:
    """The partial gradients of one unit: (nodes · s) per rank, in fp32 or wider.

    That is 4 bytes for each of n/W = 1/L of the unit's elements, whatever the reduce dtype: as
    wide as FSDP2 keeps accumulated gradients. They wait in the device memory that they are made in,
    or in the host's: each micro-batch but the first then copies one in and out again. All but these
    copies runs in the order of the current stream, which is FSDP2's one stream of reductions.
    """

    ledger: Ledger
    #: The host's memory for it, if it waits there.
    host: HostSum | None = None
    #: Micro-batches whose gradients are in the sum.
    count: int = 0
    _sum: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements that wait; 0 if nothing does."""
        return 0 if self._sum is None else self._sum.numel()

    def add(self, partial: torch.Tensor, *, owned: bool) -> None:
        """Add the partial gradients of one micro-batch.

        ``owned``: nobody else will use its memory, so that the first need not be copied.
        """
        if self.host is not None:
            self._add_on_host(partial, self.host)
        elif self._sum is None:
            self._sum = partial.to(_wide(partial.dtype), copy=not owned)
            self.ledger.hold(self._sum.nbytes)
        else:
            self._sum += partial
        self.count += 1

    def take(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum with ``partial`` added, in fp32 or wider; nothing waits afterwards."""
        total = self._read().add_(partial)
        self.discard()
        return total

    def widen(self, parts: Sequence[tuple[int, bool]], nodes: int) -> None:
        """Put zeros where the sum has nothing yet.

        ``parts`` are those of one node: how many elements each has, and whether it is there.
        """
        count, before = self.count, self._read().view(nodes, -1)
        there = iter(before.split([size for size, has in parts if has], 1))
        self.discard()
        wider = [next(there) if has else before.new_zeros(nodes, size) for size, has in parts]
        self.add(torch.cat(wider, 1).view(-1), owned=True)
        self.count = count

    def discard(self) -> None:
        if self._sum is not None and self.host is None:
            self.ledger.hold(-self._sum.nbytes)
        self._sum = None
        self.count = 0

    def _add_on_host(self, partial: torch.Tensor, host: HostSum) -> None:
        first, dtype = self._sum is None, _wide(partial.dtype)
        if self._sum is None:
            if partial.numel() * dtype.itemsize > host.memory.numel():
                raise RuntimeError(
                    f"partial gradients of {partial.dtype}: the host memory for them was planned "
                    "for another dtype; change it before FCDP is set up"
                )
            self._sum = host.memory[: partial.numel() * dtype.itemsize].view(dtype)
        else:
            self.ledger.add("host_to_device", "reduce", self._sum.nbytes)
        host.add(self._sum, partial, first=first)
        self.ledger.add("device_to_host", "reduce", self._sum.nbytes)

    def _read(self) -> torch.Tensor:
        """Return the sum on the device, where it may be changed."""
        assert self._sum is not None
        if self.host is None:
            return self._sum
        self.ledger.add("host_to_device", "reduce", self._sum.nbytes)
        return self.host.read(self._sum)


class Partials:
    """Makes the partial gradients of all units; on the host they share one arena."""

    def __init__(self, sizes: Mapping[Unit, int], streams: Streams, ledger: Ledger) -> None:
        """``sizes`` has the bytes of each sum that waits on the host."""
        self._sizes = sizes
        self._streams = streams
        self._ledger = ledger
        # One is retained: it goes out while the next one is filled.
        self._staging = Slices(streams, streams.sums_in, retain=1)
        self._made: dict[Unit, PartialGradients] = {}
        self._arena: Arena | None = None

    def of(self, unit: Unit) -> PartialGradients:
        """Make the partial gradients of one unit. Call it before ``allocate``."""
        made = self._made[unit] = PartialGradients(self._ledger)
        return made

    @property
    def lacks_memory(self) -> bool:
        """Whether sums are to wait in host memory that is not allocated yet."""
        return self._arena is None and bool(self._sizes)

    def allocate(self) -> None:
        """Allocate the host memory of all sums that wait there."""
        nbytes = sum(map(aligned, self._sizes.values()))
        self._arena = Arena(nbytes, self._streams.device)
        for unit, size in self._sizes.items():
            memory = self._arena.take(size)
            self._made[unit].host = HostSum(memory, self._streams, self._staging)
        self._ledger.host_partials_bytes = nbytes

    def drain(self) -> None:
        """Free the staging buffers, in stream order."""
        self._staging.drain()


def planned_sizes(units: Sequence[Unit]) -> dict[Unit, int]:
    """Bytes of the widest sum of each trained unit on one rank."""
    dtypes = {unit: unit.reduce_dtype for unit in units}
    return {
        unit: unit.topology.nodes * unit.shard_numel * _wide(dtype).itemsize
        for unit, dtype in dtypes.items()
        if dtype is not None
    }


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Waiting(torch.Tensor):
    """The gradient of one parameter before the step's last micro-batch. It takes no memory.

    FSDP2 gets one for a whole unit as the output of a reduction that does not cross nodes; it
    divides that, adds it up over replicas (HSDP), casts it, cuts it up and adds the parts to those
    in ``.grad``, none of which does anything.
    Whoever reads a part gets a ``RuntimeError``. Zeroing it, in whatever way, gives up what waits:
    from then on it is zeros, as with FSDP2. Nothing waits for the device.
    """

    #: Gradients that have crossed nodes already: those in ``.grad`` before.
    before: torch.Tensor | None
    zeroed: bool
    _whole: bool

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        whole: bool = False,
    ) -> Waiting:
        """``whole``: as FSDP2 gets it, before it is cut up."""
        made: Waiting = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=device
        )
        made.before, made.zeroed, made._whole = None, False, whole
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if func in (_aten.zero_.default, _aten._foreach_zero_.default):
            for each in tree_leaves(first):
                each.zero() if isinstance(each, Waiting) else each.zero_()
            return None if isinstance(first, list) else first
        if func is torch.ops.c10d.allreduce_.default:
            return first, FakeWork().boxed()  # replicas add up what has crossed nodes
        if isinstance(first, Waiting) and not first.zeroed:
            adds = func is _aten.add_.Tensor and isinstance(others[0], Waiting)
            same = func in (_aten.detach.default, _aten.clone.default)
            if adds or same or (first._whole and func is _aten.div_.Tensor):
                return first
            if func.namespace == "fsdp":  # FSDP2 notes which stream reads it
                return None
            if first._whole and func is _aten.slice.Tensor:  # parameters of one gradient dtype
                numel = others[2] - others[1]
                return Waiting((numel,), (1,), dtype=first.dtype, device=first.device, whole=True)
            if func is _aten.as_strided.default:
                size, stride = others[:2]
                return Waiting(size, stride, dtype=first.dtype, device=first.device)
            if func is _aten._to_copy.default:
                dtype = kwargs.get("dtype") or first.dtype
                device = kwargs.get("device") or first.device
                size, stride = first.size(), first.stride()
                return Waiting(size, stride, dtype=dtype, device=device, whole=first._whole)
        return func(
            *tree_map_only(Waiting, Waiting.read, args),
            **tree_map_only(Waiting, Waiting.read, kwargs),
        )

    def zero(self) -> None:
        """Give up what waits."""
        self.zeroed = True
        self.before = torch.zeros(self.size(), dtype=self.dtype, device=self.device)

    def read(self) -> torch.Tensor:
        """The gradient, if it is known on this rank."""
        if not self.zeroed or self.before is None:
            raise RuntimeError(
                "the gradient is being summed up inside the node, and is not known before it has "
                "crossed nodes: read .grad after the backward under "
                "fcdp.accumulate(model, last=True)"
            )
        return self.before

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Waiting(size={tuple(self.size())}, zeroed={self.zeroed})"


def waiting_in(param: torch.Tensor) -> Waiting | None:
    """The waiting gradient in a sharded parameter's ``.grad``."""
    local = getattr(param.grad, "_local_tensor", None)
    return local if isinstance(local, Waiting) else None

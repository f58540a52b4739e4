"""Device memory of a few blocks, filled in the order in which they are computed."""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from baselines.fuyou.layout import Group, Layer, Layout
from baselines.fuyou.memory import Dram
from baselines.fuyou.store import Store
from baselines.fuyou.transfers import Copies


@dataclass(eq=False)
class _Slot:
    """Device memory of one block, and host memory that it comes through."""

    memory: torch.Tensor
    staging: torch.Tensor
    block: int | None = None
    filled: Future[None] | None = None
    unused: list[Any] = field(default_factory=list)


class Fifo:
    """Parameters on the device: the root always, and ``slots`` blocks at once.

    Slots hold the block that is computed and those that are needed next: the last ones of forward
    stay for backward. Blocks whose bytes are kept in host memory are not read from SSD.
    """

    def __init__(
        self, layout: Layout, store: Store, dram: Dram, copies: Copies, slots: int
    ) -> None:
        self._layout = layout
        self._store = store
        self._copies = copies
        largest = max(layer.compute_bytes for layer in layout.blocks)
        staging = max(group.computed.nbytes for group in layout.groups())
        self._slots = [
            _Slot(self._on_device(largest), dram.take(staging, "parameters on their way"))
            for _ in range(min(slots, len(layout.blocks)))
        ]
        self._root = self._on_device(layout.root.compute_bytes)
        #: Tensors of groups that stay on the device or in host memory, by the group's index.
        self._resident: dict[int, torch.Tensor] = {}
        self._threads = ThreadPoolExecutor(len(self._slots), "fuyou-fifo")
        #: Blocks that will be needed, and the one that is computed.
        self._order: deque[int] = deque()
        self._computed: int | None = None
        self._load(layout.root, self._root, self._slots[0].staging, ())
        self._resident |= {group.index: part for group, part in _parts(layout.root, self._root)}
        _point(layout.root, self._root, layout.dtype)

    @property
    def device_bytes(self) -> int:
        return self._root.nbytes + sum(slot.memory.nbytes for slot in self._slots)

    def cache(self, dram: Dram, spare: int) -> int:
        """Keep blocks in host memory while ``spare`` bytes stay free; return how many.

        The first ones are kept: forward waits for them, and their update is written last. Slots
        hold the last ones from forward to backward in any case.
        """
        for count, layer in enumerate(self._layout.blocks):
            memory = dram.try_take(layer.compute_bytes, spare)
            if memory is None:
                return count
            for group, part in _parts(layer, memory):
                self._store.read_segment(group, group.computed, part).result()
                self._resident[group.index] = part
        return len(self._layout.blocks)

    def renew(self, group: Group, buffer: torch.Tensor) -> None:
        """Copy a group's update to its resident tensor, if it has one."""
        if (resident := self._resident.get(group.index)) is not None:
            self._copies.load(resident, group.part(buffer, group.computed.name), ())

    def expect(self, blocks: Iterable[int]) -> None:
        """Announce blocks that will be needed after those announced before."""
        self._order.extend(blocks)
        self._fill()

    def acquire(self, block: int) -> None:
        """Bring a block's parameters to the device; blocks come in the announced order."""
        slot = self._holding(block)
        if slot is None or not self._order or self._order[0] != block:
            raise RuntimeError(
                f"blocks: the model computed block {block} out of turn; must be those that it "
                "computes one after another, each once"
            )
        self._computed = self._order.popleft()
        assert slot.filled is not None
        with self._copies.waiting():
            slot.filled.result()
        _point(self._layout.blocks[block], slot.memory, self._layout.dtype)

    def release(self, block: int) -> None:
        """Let a block go, unless it is needed soon, and begin to load another."""
        slot = self._holding(block)
        assert slot is not None
        _empty(self._layout.blocks[block], self._layout.dtype, slot.memory.device)
        self._computed, slot.unused = None, self._copies.used()
        self._fill()

    def stop(self) -> None:
        """Forget what was expected, and let all blocks go."""
        self._order.clear()
        self._computed = None
        for slot in self._slots:
            if slot.filled is not None:
                slot.filled.result()
            if slot.block is not None:
                layer = self._layout.blocks[slot.block]
                _empty(layer, self._layout.dtype, slot.memory.device)
            slot.block = slot.filled = None

    def close(self) -> None:
        self._threads.shutdown()

    def _fill(self) -> None:
        first = [] if self._computed is None else [self._computed]
        # As many blocks as there are slots: those that are needed first.
        upcoming = list(dict.fromkeys((*first, *self._order)))[: len(self._slots)]
        free = [slot for slot in self._slots if slot.block not in upcoming]
        for block in upcoming:
            if self._holding(block) is None:
                slot = free.pop()
                slot.block = block
                arguments = self._layout.blocks[block], slot.memory, slot.staging, slot.unused
                slot.filled = self._threads.submit(self._load, *arguments)

    def _load(
        self, layer: Layer, memory: torch.Tensor, staging: torch.Tensor, unused: Sequence[Any]
    ) -> None:
        for group, part in _parts(layer, memory):
            source = self._resident.get(group.index)
            if source is None:
                source = staging[: part.numel()]
                self._store.read_segment(group, group.computed, source).result()
            self._copies.load(part, source, unused)

    def _holding(self, block: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.block == block), None)

    def _on_device(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._copies.device)


def _parts(layer: Layer, memory: torch.Tensor) -> list[tuple[Group, torch.Tensor]]:
    sizes = [group.computed.nbytes for group in layer.groups]
    parts = memory[: layer.compute_bytes].split(sizes)
    return list(zip(layer.groups, parts, strict=True))


def _point(layer: Layer, memory: torch.Tensor, dtype: torch.dtype) -> None:
    for group, part in _parts(layer, memory):
        for param, view in zip(group.params, group.views(part, dtype), strict=True):
            param.data = view


def _empty(layer: Layer, dtype: torch.dtype, device: torch.device) -> None:
    for group in layer.groups:
        for param in group.params:
            param.data = torch.empty(0, dtype=dtype, device=device)

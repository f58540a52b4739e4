"""Parts of tensors that lie where a shard does, and the 16-bit and other words that they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Integers as wide as the elements of a tensor: what is compared are bits.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """A block of a tensor: its name, the whole shape, and where in it the block lies."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def flat(self, places: torch.Tensor) -> torch.Tensor:
        """Places (k) of the block, as if it were flat, in the whole flat tensor."""
        if not self.shape:
            return places
        within = torch.unravel_index(places, self.sizes)
        total = torch.zeros_like(places)
        for size, offset, at in zip(self.shape, self.offsets, within, strict=True):
            total.mul_(size).add_(at + offset)
        # As vLLM and TRL have them, where that is enough.
        return total.to(torch.int32) if math.prod(self.shape) <= 2**31 else total

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block of a whole tensor: a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole


def words(values: torch.Tensor) -> torch.Tensor:
    """The bits of contiguous ``values``, one integer each."""
    return values.view(_WORDS[values.itemsize])


def flattened(blocks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A copy of the blocks in host memory, one after the other."""
    return torch.cat([block.detach().to("cpu", dtype).reshape(-1) for block in blocks])

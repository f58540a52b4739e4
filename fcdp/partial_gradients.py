"""Partial gradients: a unit's gradients summed inside the node, until the last micro-batch."""

from __future__ import annotations

import torch

from fcdp.counts import Ledger


class PartialGradients:
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
        if self._sum is None:
            wide = torch.promote_types(partial.dtype, torch.float32)
            self._sum = partial.to(wide, copy=not owned)
            self._ledger.hold(self._sum.nbytes)
        else:
            self._sum += partial
        self.count += 1

    def take(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum with ``partial`` added, in fp32 or wider; nothing waits afterwards."""
        assert self._sum is not None
        total = self._sum.add_(partial)
        self.discard()
        return total

    def discard(self) -> None:
        """Forget the sum."""
        if self._sum is not None:
            self._ledger.hold(-self._sum.nbytes)
        self._sum = None
        self.count = 0

"""A worker's parameters as one flat tensor, or this rank's part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


class Flat:
    """Parameters in their order, end to end, in float32; of sharded ones this rank's shards."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self.numel = sum(part.numel() for part in self._parts())

    def copy_to(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy the parameters to ``flat`` (elements); to the host's memory a copy is queued."""
        parts = self._parts()
        torch._foreach_copy_(_views(flat, parts), parts, non_blocking=True)
        return flat

    def copy_from(self, flat: torch.Tensor) -> None:
        """Copy ``flat`` (elements) to the parameters; from the host's memory a copy is queued."""
        parts = self._parts()
        torch._foreach_copy_(parts, _views(flat, parts), non_blocking=True)

    def squared_distance(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum of squares of the differences from ``flat`` (elements), a scalar.

        Where ``flat`` is on the host, one parameter of it at a time is copied to the device.
        """
        parts = self._parts()
        squares = [
            (part - view.to(part.device, non_blocking=True)).square().sum()
            for part, view in zip(parts, _views(flat, parts), strict=True)
        ]
        return torch.stack(squares).sum()

    def _parts(self) -> list[torch.Tensor]:
        # Anew each time: FSDP2 puts other shards in place when a model is loaded or moved.
        return [
            (param.to_local() if isinstance(param, DTensor) else param).detach()
            for param in self._params
        ]


def _views(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``flat`` cut as these parts are."""
    cut = flat.split([part.numel() for part in parts])
    return [view.view_as(part) for view, part in zip(cut, parts, strict=True)]

"""Checksums: of entries (``verify=True``) and of what a unit's parameters hold."""

from __future__ import annotations

import torch

from fcdp.unit import Unit

#: Odd, so that multiplying by it loses no bit.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64


def checksum(shard: torch.Tensor) -> torch.Tensor:
    """A position-dependent sum of the tensor's bytes: int64 scalar on its device, wrapping."""
    raw = shard.reshape(-1).view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    words = raw.view(torch.int64)
    weights = torch.arange(1, words.numel() + 1, device=words.device, dtype=torch.int64)
    return (words * (weights * _STRIDE | 1)).sum()


def contents(unit: Unit) -> list[int]:
    """A checksum of each of this rank's shards; of none that has no memory yet (``meta``)."""
    shards = [param._local_tensor.detach() for param in unit.params]
    sums = [checksum(shard) for shard in shards if shard.device.type != "meta"]
    return torch.stack(sums).tolist() if sums else []

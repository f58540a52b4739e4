"""Checksums: they tell whether memory still holds what it held, at the speed of reading it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: Odd, so that multiplying by it loses no bit.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_WORD = torch.int64.itemsize
#: Words per row of the table that two passes sum along both sides.
_COLUMNS = 512


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a sum of the tensor's bytes that depends on their places.

    An int64 scalar on the tensor's device, wrapping; nothing waits for the device. Two passes that
    only read: a table of words is summed by rows and by columns, and these sums are weighted by
    their place. A product of every word with a weight would write as much as it reads.
    """
    raw = values.reshape(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD:
        raw = raw.clone()  # a shard inside a buffer may begin anywhere; words may not
    if raw.numel() % _WORD:
        raw = F.pad(raw, (0, -raw.numel() % _WORD))
    words = raw.view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    rest = words[whole:]
    if not whole:
        return _weighted(rest)
    table = words[:whole].view(-1, _COLUMNS)
    # One weight odd, the other even: a word's own, their sum, is odd, so that no change of one
    # word is lost, not even of its highest bit.
    total = _weighted(table.sum(0)) + _weighted(table.sum(1)) * 2
    # Another weight than the table's own: what moves between the two is seen.
    return total + _weighted(rest) * _STRIDE if rest.numel() else total


def _weighted(words: torch.Tensor) -> torch.Tensor:
    """Sum int64 words, each times an odd number that is its place's own."""
    return (words * _weights(words.numel(), words.device)).sum()


#: Weights by device. Kept: making them would take more calls than using them, for each parameter.
_made: dict[torch.device, torch.Tensor] = {}


def _weights(count: int, device: torch.device) -> torch.Tensor:
    known = _made.get(device)
    if known is None or known.numel() < count:
        places = torch.arange(1, max(count, 2 * _COLUMNS) + 1, device=device, dtype=torch.int64)
        known = _made[device] = places * _STRIDE | 1
    return known[:count]

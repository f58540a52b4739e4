"""What one rank sends of its shard to those that hold an earlier version of it."""

from __future__ import annotations

import sys

import torch

from fcdp.checksum import checksum
from fcdp.delta import difference

#: Dtypes whose shards are told as differences. Of four bytes, the lower two are told as they are:
#: an update changes them whatever its size.
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

#: Which version the difference is from, and the checksum of the one that it leads to.
_PREAMBLE = torch.int64
_PREAMBLE_BYTES = 2 * _PREAMBLE.itemsize


def most_bytes(shard: torch.Tensor) -> int:
    """The most bytes that the message of a shard takes: about 1/10,000 more than the shard."""
    low = 2 * shard.numel() if shard.itemsize == 4 else 0
    return _PREAMBLE_BYTES + _aligned(low) + difference.capacity(shard.numel())


def write(new: torch.Tensor, base: torch.Tensor, version: int) -> torch.Tensor:
    """What leads from ``base`` (n), which is ``version``, to ``new`` (n), as uint8.

    Both are contiguous, on the host, and of the same one of :data:`DTYPES`.
    """
    preamble = torch.tensor([version, int(checksum(new))], dtype=_PREAMBLE, device="cpu")
    parts = [preamble.view(torch.uint8)]
    now, before = new.view(torch.int16), base.view(torch.int16)
    if new.itemsize == 4:
        low, now = _halves(now)
        _, before = _halves(before)
        parts.append(low.contiguous().view(torch.uint8))
        parts.append(low.new_zeros(_aligned(low.numel() * 2) // 2 - low.numel()).view(torch.uint8))
        now, before = now.contiguous(), before.contiguous()
    return torch.cat([*parts, difference.encode(now, before)])


def read(message: torch.Tensor, row: torch.Tensor, version: int) -> None:
    """Turn ``row`` (n, contiguous), which is ``version``, to what ``message`` leads to.

    ``message`` (uint8) may be longer than what was written. Raises ``ValueError`` for one that
    leads from another version, and for one that was damaged.
    """
    base, told = message[:_PREAMBLE_BYTES].view(_PREAMBLE).tolist()
    if base != version:
        raise ValueError(f"a difference from version {base} of a shard, of which {version} is here")
    words, rest = row.view(torch.int16), message[_PREAMBLE_BYTES:]
    if row.itemsize == 4:
        low, high = _halves(words)
        low.copy_(rest[: 2 * row.numel()].view(torch.int16))
        changed = high.contiguous()
        difference.apply(rest[_aligned(2 * row.numel()) :], changed)
        high.copy_(changed)
    else:
        difference.apply(rest, words)
    if int(checksum(row)) != told:
        raise ValueError("a difference between versions of a shard: leads to another checksum")


def _halves(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the higher halves of numbers of four bytes."""
    assert sys.byteorder == "little"
    low, high = words.view(-1, 2).unbind(1)
    return low, high


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % 4

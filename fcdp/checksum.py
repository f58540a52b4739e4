"""Checksums: they tell whether memory still holds what it held, at the speed of reading it."""

from __future__ import annotations

import ctypes
import zlib

import torch
import torch.nn.functional as F

#: Odd, so that multiplying by it loses no bit.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_WORD = torch.int64.itemsize
#: Words that are mixed at a time: what a GPU is busy with.
_BLOCK = 2**20


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a sum of the tensor's bytes that depends on their places.

    An int64 scalar on the tensor's device; nothing waits for the device. Sums of one kind of
    device are comparable with each other alone.
    """
    if values.is_cpu:
        # As fast as sums of words on large tensors, and without their ten calls on small ones.
        values = values.contiguous()  # may be a copy, which must outlive the sum
        return torch.tensor(zlib.crc32(bytes_of(values)), device="cpu")
    return sum_of_words(values)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, for as long as the tensor lives."""
    size = values.numel() * values.itemsize
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(values.data_ptr())).cast("B")


def sum_of_words(values: torch.Tensor) -> torch.Tensor:
    """Return a wrapping sum of the tensor's mixed words, on its device.

    Working memory is two blocks, 16 MiB.
    """
    raw = values.reshape(-1).view(torch.uint8)
    if raw.storage_offset() % _WORD:
        raw = raw.clone()  # a shard inside a buffer may begin anywhere; words may not
    if raw.numel() % _WORD:
        raw = F.pad(raw, (0, -raw.numel() % _WORD))
    first, *others = raw.view(torch.int64).split(_BLOCK)
    total = _of_block(first)
    for words in others:
        total = total * _STRIDE + _of_block(words)
    return total


def _of_block(words: torch.Tensor) -> torch.Tensor:
    """Sum a block's words, each mixed with its place.

    A weighted sum would take less time and lose what ordinary writes do: all signs, or all
    exponents, change the same high bits of many words, and sums wrap.
    """
    mixed = words ^ _keys(words.device)[: words.numel()]
    mixed *= _MIX
    mixed ^= mixed >> 32  # the high bits count like all others
    return mixed.sum()


#: Keys by device. Kept: making them would take more calls than using them, for each parameter.
_made: dict[torch.device, torch.Tensor] = {}


def _keys(device: torch.device) -> torch.Tensor:
    """Return a number per place in a block that has nothing to do with the others."""
    if device not in _made:
        keys = torch.arange(1, _BLOCK + 1, device=device, dtype=torch.int64) * _STRIDE
        for _ in range(2):
            keys = (keys ^ (keys >> 29)) * _MIX
        _made[device] = keys ^ (keys >> 32)
    return _made[device]

"""Checksums, which show whether memory still holds what it held."""

import ctypes
import functools
import math
import zlib

import torch

#: Odd, so that multiplying by it loses no bit.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
#: Words by their bytes, half of a sum at most. The widest that divides a tensor is used: each costs
#: the same.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
#: Words of eight bytes in a line of the table that is added up on the CPU, and bytes below which
#: that saves nothing. The number is odd: of an even one all signs of a line could change unseen.
_LINE, _QUICK_BYTES = 509, 2**16
#: Words that are summed up at a time: what a GPU is busy with.
_BLOCK = 2**20


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return a sum of the tensor's bytes that depends on their places.

    An int64 scalar on the tensor's device; nothing waits for the device. Sums of one kind of
    device are comparable with each other alone.
    """
    if values.is_cpu:
        return torch.tensor(_digest(values), device="cpu")
    return sum_of_words(values.contiguous().view(-1))


def quick_checksum(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the ``quick_digest`` of a tensor on the CPU as an int64 scalar.

    ``out`` takes it where it is given.
    """
    digest = quick_digest(values)
    return torch.tensor(digest, device="cpu") if out is None else out.fill_(digest)


def quick_digest(values: torch.Tensor) -> int:
    """Return a checksum of a tensor on the CPU in an eighth of ``checksum``'s time.

    Words of eight bytes are added up, wrapping, along the lines and along the columns of a table,
    and the CRC-32 of both sums is returned. A single changed word changes both. What is not noticed
    leaves every line's and every column's sum as it was. Small tensors and those that are no whole
    words get the CRC-32 that ``checksum`` takes.
    """
    nbytes = values.nbytes
    if nbytes < _QUICK_BYTES or nbytes % 8 or not values.is_contiguous():
        return _digest(values)
    if (values.data_ptr() | int(values.storage_offset()) * values.itemsize) % 8:
        return _digest(values)
    words = values.view(-1).view(torch.int64)
    lines = words.numel() // _LINE
    table = words[: lines * _LINE].view(lines, _LINE)
    digest = 0
    for part in (table.sum(0), table.sum(1), words[lines * _LINE :]):
        digest = zlib.crc32(bytes_of(part), digest)
    return digest


def _digest(values: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor on the CPU, as of files.

    On large tensors it takes a third of the time that sums of words take.
    """
    values = values.contiguous()  # may be a copy, which must outlive the sum
    return zlib.crc32(bytes_of(values))


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, for as long as the tensor lives."""
    size = values.numel() * values.itemsize
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(values.data_ptr())).cast("B")


def sum_of_words(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a wrapping sum of the tensor's words, each times the key of its place, on its device.

    ``out`` (int64, a scalar) takes the sum where it is given.

    A word has at most half the bits of its key and of the sum: whichever of them change, half of
    the key still counts, and no change falls out at the top. Were words as wide as sums, all signs
    or all exponents would change the same high bits of many words, and sums wrap.

    The tensor is contiguous and has one dimension. Two operations, of at most 8 MiB of working
    memory; two more for each block of a large tensor.
    """
    width = math.gcd(values.nbytes, 4)
    itemsize = values.itemsize
    # Where bytes lie does not count. Elements that are narrower than words may lie between these.
    if itemsize < width and (values.data_ptr() | int(values.storage_offset()) * itemsize) % width:
        values = values.clone()
    words = values.view(_WORDS[width])
    count = words.numel()
    if count <= _BLOCK:
        return torch.sum(words * _keys(words.device, count), 0, out=out)
    return sum_of_words(torch.stack([sum_of_words(block) for block in words.split(_BLOCK)]), out)


@functools.cache
def _keys(device: torch.device, count: int) -> torch.Tensor:
    """Return an odd number per place that has nothing to do with the others.

    Cached: making them would take more calls than using them, for each parameter.
    """
    if count < _BLOCK:
        return _keys(device, _BLOCK)[:count]
    made = torch.arange(1, count + 1, device=device, dtype=torch.int64) * _STRIDE
    for _ in range(2):
        made = (made ^ (made >> 29)) * _MIX
    return (made ^ (made >> 32)) | 1

"""Codecs of what travels between nodes: blocks of small integers with a scale each.

Quantised gathers of parameters and reductions of gradients, as ZeRO++ has them (qwZ and qgZ,
arXiv 2306.10209), with any cache policy. Both are lossy; :mod:`fcdp.delta` is not.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F


@runtime_checkable
class Codec(Protocol):
    """Turns values into bytes and back, alike on every rank; bytes depend on nothing but values.

    A value that is not finite must not decode to a finite one: gradient scalers look for it.

    Example:
        >>> isinstance(fcdp.BlockInt8(), fcdp.Codec)
        True
    """

    def encoded_bytes(self, numel: int) -> int:
        """Bytes that values take, whatever their dtype.

        Args:
            numel: How many values.

        Returns:
            A count of bytes.
        """
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Values as bytes.

        Args:
            values: (n), of a floating dtype.

        Returns:
            uint8 (``encoded_bytes(n)``), contiguous.
        """
        ...

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` from what ``encode`` made of as many values.

        Args:
            encoded: uint8 (``encoded_bytes(n)``). It begins at a multiple of four bytes, as every
                tensor does that is no view.
            out: (n), of a floating dtype.
        """
        ...


class _Blocks:
    """Integers of ``bits`` from −``limit`` to ``limit``, and a scale for each block of them."""

    block: int
    bits: ClassVar[int]
    #: The largest code. The smallest is its negative: −128, of eight bits, stays unused.
    limit: ClassVar[int]

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"block = {self.block!r}: must be a whole number, 1 or more")

    def encoded_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + _ceil_div(numel * self.bits, 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        blocks = _in_blocks(values.float(), self.block)
        scales = blocks.abs().amax(1) / self.limit
        # A quotient below the smallest normal number is too rough for a scale; zero is none.
        scales.clamp_min_(torch.finfo(torch.float32).tiny)
        # Beside a value that is not finite the scale is not either: no code makes it finite.
        codes = (blocks / scales[:, None]).round_().to(torch.int8).flatten()[: values.numel()]
        packed = codes.view(torch.uint8) if self.bits == 8 else _pack(codes)
        return torch.cat([scales.view(torch.uint8), packed])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        numel = out.numel()
        at = self._scale_bytes(numel)
        scales, packed = encoded[:at].view(torch.float32), encoded[at:]
        codes = packed.view(torch.int8) if self.bits == 8 else _unpack(packed)[:numel]
        out.copy_((_in_blocks(codes, self.block) * scales[:, None]).flatten()[:numel])

    def _scale_bytes(self, numel: int) -> int:
        return _ceil_div(numel, self.block) * torch.float32.itemsize


@dataclass(frozen=True)
class BlockInt8(_Blocks):
    """Eight bits a value, symmetric about zero, and an fp32 scale for each ``block`` values.

    n values take n + 4·⌈n / block⌉ bytes: at the default about 1/4 of fp32, 1/2 of bf16. An error
    is at most half the scale, which is the block's largest magnitude / 127; beside an infinity or
    a NaN the whole block decodes to values that are not finite. fp64 is rounded to fp32 first.

    Args:
        block: Values that share a scale.

    Raises:
        ValueError: For a ``block`` below 1.

    Example:
        >>> codec, out = fcdp.BlockInt8(), torch.empty(3)
        >>> codec.decode(codec.encode(torch.tensor([1.27, -0.5, 0.0])), out)
        >>> out
        tensor([ 1.2700, -0.5000,  0.0000])
    """

    block: int = 256
    bits: ClassVar[int] = 8
    limit: ClassVar[int] = 127


@dataclass(frozen=True)
class BlockInt4(_Blocks):
    """Four bits a value, two values a byte, and an fp32 scale for each ``block`` values.

    n values take ⌈n / 2⌉ + 4·⌈n / block⌉ bytes: at the default about 1/7 of fp32. As ``BlockInt8``
    otherwise, with the scale the block's largest magnitude / 7.

    Args:
        block: Values that share a scale.

    Raises:
        ValueError: For a ``block`` below 1.

    Example:
        >>> fcdp.BlockInt4().encoded_bytes(1024)  # of 4096 in fp32
        576
    """

    block: int = 64
    bits: ClassVar[int] = 4
    limit: ClassVar[int] = 7


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """(n) as (⌈n / block⌉, block), the last filled up with zeros."""
    return F.pad(values, (0, -values.numel() % block)).view(-1, block)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """(n, int8, −8 to 7) as (⌈n / 2⌉, uint8), the first of each two in the lower bits."""
    low, high = F.pad(codes.view(torch.uint8) & 0xF, (0, codes.numel() % 2)).view(-1, 2).unbind(1)
    return low | high << 4


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """(m, uint8) as (2·m, int8), −8 to 7."""
    low, high = packed << 4, packed & 0xF0
    # Shifted right as signed numbers, the upper bits keep the sign.
    return torch.stack([low, high], 1).flatten().view(torch.int8) >> 4

"""Small signed numbers as codes of two, four or eight bits, packed without a loop or a branch.

A code of b bits holds what lies within ±(2^(b−1) − 1). Its lowest value, −2^(b−1), is the *escape*:
the number stands elsewhere. Every function makes a few passes over memory that a core's cache
holds; none compares element by element, which takes as long as all of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

numpy: Any
try:  # torch does not need it, but has no search for places as fast
    import numpy
except ImportError:
    numpy = None

Bits = Literal[2, 4, 8]

#: Numbers are packed in multiples of so many: their words' bitmap then takes whole int16 words.
GRANULE = 128
#: Multiplied with eight bytes of 0 or 1, puts one bit of each in the highest byte, in order.
_GATHER_BITS = 0x0102040810204080
#: In byte i, bit i alone.
_EACH_BIT = 0x8040201008040201 - 2**64
#: Multiplied with four lanes of int8, puts their codes of two bits side by side in the highest
#: byte; with four of int16, those of four bits in the highest two.
_GATHER_TWO = 1 << 24 | 1 << 18 | 1 << 12 | 1 << 6
_GATHER_FOUR = 1 << 48 | 1 << 36 | 1 << 24 | 1 << 12


@dataclass(frozen=True)
class Codes:
    """Codes of ``bits`` bits in int16 words."""

    bits: Bits

    @property
    def limit(self) -> int:
        """The smallest magnitude that is escaped."""
        return int(2 ** (self.bits - 1))

    @property
    def per_word(self) -> int:
        return 16 // self.bits

    def pack(self, numbers: torch.Tensor) -> torch.Tensor:
        """``numbers`` (n, int16) as words (n · bits / 16, int16); n is a multiple of a granule."""
        codes = numbers.clamp(-self.limit, self.limit)
        if self.bits == 8:
            return codes.to(torch.int8).view(torch.int16)
        if self.bits == 4:
            lanes = codes.bitwise_and_(0xF).view(torch.int64).mul_(_GATHER_FOUR)
            return lanes.bitwise_right_shift_(48).to(torch.int16)
        # Half as wide, each pass takes half as long.
        lanes = codes.to(torch.int8).view(torch.int32).bitwise_and_(0x03030303).mul_(_GATHER_TWO)
        return lanes.bitwise_right_shift_(24).to(torch.uint8).view(torch.int16)

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        """The numbers (int16) of ``words`` (m, int16); escaped ones are ``-limit``."""
        if self.bits == 8:
            return words.view(torch.int8).to(torch.int16)
        packed = words.view(torch.uint8)
        # The products of a byte do not overlap: a multiplication copies it to each lane.
        if self.bits == 2:
            lanes = packed.to(torch.int64).mul_(1 | 1 << 14 | 1 << 28 | 1 << 42)
            codes = lanes.bitwise_and_(0x0003_0003_0003_0003)
        else:
            codes = packed.to(torch.int32).mul_(1 | 1 << 12).bitwise_and_(0x000F_000F)
        # The highest bit of a code is its sign.
        return codes.view(torch.int16).bitwise_xor_(self.limit).sub_(self.limit)

    def escaped(self, words: torch.Tensor) -> torch.Tensor:
        """Places (k, int64) of the bytes of ``words`` (m, int16) that hold an escape."""
        codes = words.view(torch.uint8)
        low = sum((self.limit - 1) << at for at in range(0, 8, self.bits))
        # A code's highest bit of this sum is set where any lower bit of the code is.
        others = (codes & low).add_(low)
        return places(others.bitwise_not_().bitwise_and_(codes).bitwise_and_(0xFF ^ low).bool())

    def of_bytes(self, numbers: torch.Tensor) -> torch.Tensor:
        """``numbers`` (n, int16), those of each byte of codes as one element (n · bits / 8)."""
        return numbers.view({2: torch.int64, 4: torch.int32, 8: torch.int16}[self.bits])

    def escapes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Whether each of ``numbers`` (int16) is escaped, a bool each."""
        return numbers.clamp(1 - self.limit, self.limit - 1) != numbers


def places(flags: torch.Tensor) -> torch.Tensor:
    """Where ``flags`` (n, bool) are set, as int64 (k)."""
    if numpy is None:
        return flags.nonzero().view(-1)
    return torch.from_numpy(numpy.flatnonzero(flags.numpy()))


def order_of(keys: torch.Tensor) -> torch.Tensor:
    """The places of ``keys`` (n, uint8) from the smallest to the largest, equal ones in order."""
    if numpy is None:
        return keys.argsort(stable=True)
    return torch.from_numpy(numpy.argsort(keys.numpy(), kind="stable"))


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    """``flags`` (n, bool; n a multiple of 8) as uint8 (n / 8), the first in the lowest bit."""
    eights = flags.view(torch.int64) * _GATHER_BITS
    return eights.bitwise_right_shift_(56).to(torch.uint8)


def unpack_flags(packed: torch.Tensor) -> torch.Tensor:
    """The flags (8·m, bool) of ``packed`` (m, uint8)."""
    eights = packed.to(torch.int64).mul_(0x0101010101010101).bitwise_and_(_EACH_BIT)
    return eights.view(torch.uint8) != 0

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
#: Multiplied with four int16 lanes, puts their codes side by side in the highest 16 bits.
_GATHER_CODES = {2: 1 << 48 | 1 << 34 | 1 << 20 | 1 << 6, 4: 1 << 48 | 1 << 36 | 1 << 24 | 1 << 12}


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
        codes = numbers.clamp(-self.limit, self.limit).bitwise_and_(2 * self.limit - 1)
        if self.bits == 8:
            return codes.to(torch.int8).view(torch.int16)
        lanes = codes.view(torch.int64).mul_(_GATHER_CODES[self.bits]).bitwise_right_shift_(48)
        return lanes.to(torch.uint8 if self.bits == 2 else torch.int16).view(torch.int16)

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
        """Places (k, int64) of the words (m, int16) that hold an escape."""
        low = sum((self.limit - 1) << at for at in range(0, 16, self.bits))
        # A code's highest bit of this sum is set where any lower bit of the code is.
        others = (words & low).add_(low)
        return places((words & ~others).bitwise_and_(~low).to(torch.bool))

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

"""Small signed numbers as codes of two, four or eight bits: on any device, and by a host's loops.

A code of b bits holds what lies within ±(2^(b−1) − 1). Its lowest value, −2^(b−1), is the *escape*:
the number stands elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fcdp.delta.compiled import Bytes, Near, Words, compiled

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
#: Numbers that stay in a core's first cache.
_NEAR = 2048
#: Groups of eight words beside each other in a sample: one line of a core's caches.
_BESIDE = 4
# Loops take 64 bits as unsigned numbers, with constants of that type: only these wrap for certain.
#: All bits but the highest of each code of two, four or eight, in 64; by the logarithm of two. The
#: sum of a code's lower bits and as many set ones has its highest bit if one of them is set.
_LOW = np.array([0, 0x5555555555555555, 0x7777777777777777, 0x7F7F7F7F7F7F7F7F], np.uint64)
#: Multiplied with 2^i, its highest six bits are those of 2^i alone: ``BIT`` has i.
DE_BRUIJN, HIGHEST_SIX = np.uint64(0x03F79D71B4CB0A89), np.uint64(58)
BIT = np.zeros(64, np.int64)
BIT[[(int(DE_BRUIJN) << bit) % 2**64 >> 58 for bit in range(64)]] = np.arange(64)
NONE = np.uint64(0)


@dataclass(frozen=True)
class Codes:
    """Codes of ``bits`` bits in int16 words."""

    bits: Bits

    @property
    def limit(self) -> int:
        """The smallest magnitude that is escaped."""
        return int(2 ** (self.bits - 1))

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

    def escapes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Whether each of ``numbers`` (int16) is escaped, a bool each."""
        return numbers.clamp(1 - self.limit, self.limit - 1) != numbers


@compiled
def sample(new: Words, base: Words, step: int) -> tuple[int, int, int, int, int]:
    """Sample one in ``step`` lines of groups of eight words: count groups, and those that differ.

    Count also the words that differ by 2, 8 and 128 or more.
    """
    count = some = two = eight = wide = 0
    for line in range(0, new.size, 8 * _BESIDE * step):
        for begin in range(line, min(line + 8 * _BESIDE, new.size), 8):
            changed = False
            for at in range(begin, min(begin + 8, new.size)):
                number = np.int16(new[at] - base[at])
                if number != 0:
                    changed = True
                two += not -2 < number < 2
                eight += not -8 < number < 8
                wide += not -128 < number < 128
            count += 1
            some += changed
    return count, some, two, eight, wide


@compiled
def pack(
    new: Words, base: Words, bits: int, codes: Bytes, near: Near, wide: Words
) -> tuple[int, int]:
    """Encode the difference from ``base`` (n) to ``new`` (n) as ``codes`` (n · bits / 8).

    A number that these do not hold goes to ``near`` (n at most), and is 0 there if a byte does not
    hold it and it goes to ``wide`` (n at most). Returns how many numbers went to each.
    """
    low, high = np.int16(-(1 << bits - 1)), np.int16(1 << bits - 1)
    shift, blocks = bits // 4 + 1, codes.view(np.uint64)
    lower = _LOW[shift]
    numbers = np.empty(_NEAR, np.int8)
    some = far = 0
    for begin in range(0, new.size, _NEAR):
        now, before = new[begin : begin + _NEAR], base[begin : begin + _NEAR]
        to = codes[begin * bits // 8 : (begin + now.size) * bits // 8]
        for at in range(now.size):
            number = np.int16(now[at] - before[at])
            number = number if number > low else low
            numbers[at] = number if number < high else high
        # Each width by a loop of its own, which the compiler makes vector instructions of.
        if bits == 2:
            for at in range(to.size):
                one, two = numbers[4 * at] & 3, (numbers[4 * at + 1] & 3) << 2
                three, four = (numbers[4 * at + 2] & 3) << 4, (numbers[4 * at + 3] & 3) << 6
                to[at] = one | two | three | four
        elif bits == 4:
            for at in range(to.size):
                to[at] = numbers[2 * at] & 15 | (numbers[2 * at + 1] & 15) << 4
        else:
            for at in range(to.size):
                to[at] = numbers[at]
        for block in range(begin * bits // 64, (begin + now.size) * bits // 64):
            left = blocks[block]
            left &= ~((left & lower) + lower) & ~lower
            while left != NONE:
                lowest = left & (NONE - left)
                left ^= lowest
                at = (64 * block + BIT[lowest * DE_BRUIJN >> HIGHEST_SIX] >> shift) - begin
                number = np.int16(now[at] - before[at])
                near[some] = number
                if not -128 <= number <= 127:
                    near[some] = 0
                    wide[far] = number
                    far += 1
                some += 1
    return some, far


@compiled
def add(codes: Bytes, bits: int, near: Near, wide: Words, base: Words) -> bool:
    """Add to ``base`` (n) the numbers that :func:`pack` encoded as these three arrays.

    Returns whether ``near`` and ``wide`` have as many as codes escape; else ``base`` is undefined.
    """
    escape, shift, blocks = -(1 << bits - 1), bits // 4 + 1, codes.view(np.uint64)
    lower = _LOW[shift]
    numbers = np.empty(_NEAR, np.int8)
    some = far = 0
    for begin in range(0, base.size, _NEAR):
        words = base[begin : begin + _NEAR]
        packed = codes[begin * bits // 8 : (begin + _NEAR) * bits // 8]
        # The highest bit of a code is its sign.
        if bits == 2:
            for at in range(packed.size):
                code = packed[at]
                numbers[4 * at] = ((code & 3) ^ 2) - 2
                numbers[4 * at + 1] = ((code >> 2 & 3) ^ 2) - 2
                numbers[4 * at + 2] = ((code >> 4 & 3) ^ 2) - 2
                numbers[4 * at + 3] = (code >> 6 ^ 2) - 2
        elif bits == 4:
            for at in range(packed.size):
                numbers[2 * at] = ((packed[at] & 15) ^ 8) - 8
                numbers[2 * at + 1] = (packed[at] >> 4 ^ 8) - 8
        else:
            for at in range(packed.size):
                numbers[at] = packed[at]
        for at in range(words.size):
            words[at] += numbers[at]
        for block in range(begin * bits // 64, min((begin + _NEAR) * bits // 64, blocks.size)):
            left = blocks[block]
            left &= ~((left & lower) + lower) & ~lower
            while left != NONE:
                lowest = left & (NONE - left)
                left ^= lowest
                at = (64 * block + BIT[lowest * DE_BRUIJN >> HIGHEST_SIX] >> shift) - begin
                if some == near.size or at >= words.size:
                    return False
                number = np.int16(near[some])
                some += 1
                if number == 0:
                    if far == wide.size:
                        return False
                    number = wide[far]
                    far += 1
                words[at] += number - escape
    return some == near.size and far == wide.size


@compiled
def keep_changed(words: Words, bitmap: Bytes, changed: Words) -> int:
    """Write those of ``words`` (m) that are not zero to ``changed`` (m); returns how many.

    ``bitmap`` (m / 8) has a bit for each of ``words``, the first in the lowest, set for those.
    """
    count = 0
    for eight in range(bitmap.size):
        flags = 0
        for at in range(8):
            word = words[8 * eight + at]
            changed[count] = word
            count += word != 0
            flags |= (word != 0) << at
        bitmap[eight] = flags
    return count


@compiled
def spread_changed(bitmap: Bytes, changed: Words, words: Words) -> bool:
    """Set those of ``words`` (m, all zero) that ``bitmap`` (m / 8) names to ``changed``, in order.

    Returns whether they are as many.
    """
    count = 0
    for at in range(words.size):
        if bitmap[at // 8] >> at % 8 & 1:
            if count == changed.size:
                return False
            words[at] = changed[count]
            count += 1
    return count == changed.size


def places(flags: torch.Tensor) -> torch.Tensor:
    """Return the indices (k, int64) of set ``flags`` (n, bool), by numpy, which is faster."""
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    """``flags`` (n, bool; n a multiple of 8) as uint8 (n / 8), the first in the lowest bit."""
    eights = flags.view(torch.int64) * _GATHER_BITS
    return eights.bitwise_right_shift_(56).to(torch.uint8)


def unpack_flags(packed: torch.Tensor) -> torch.Tensor:
    """The flags (8·m, bool) of ``packed`` (m, uint8)."""
    eights = packed.to(torch.int64).mul_(0x0101010101010101).bitwise_and_(_EACH_BIT)
    return eights.view(torch.uint8) != 0

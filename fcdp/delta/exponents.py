"""Floating-point numbers by themselves: exponents in few bits, signs and mantissas as they are.

Numbers near each other in a tensor are of one magnitude. Each block tells its mean exponent, and
each number how far it is from that: two bits hold −1, 0 and 1. What is further comes in two bits
again, counted on from there, then in two more, and the rest in bytes. Near the entropy of such
differences, as packed codes and without a search: about 11 of bf16's 16 bits for gradients.
"""

from __future__ import annotations

import torch

from fcdp.delta.packing import GRANULE, Codes, places

#: Numbers that share a mean exponent.
_BLOCK = 128
#: How often what two bits cannot hold comes in two bits again.
LEVELS = 3
#: Bits below the exponent in a word of bf16 (or in the upper half of fp32).
_MANTISSA = 7
_CODES = Codes(2)


def write(words: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """``words`` (n, int16) as counts of what each level could not hold, and parts (uint8)."""
    means = _blocks((words >> _MANTISSA).to(torch.uint8)).float().mean(1)
    # Exponents fall off slowly below their mean, and fast above it.
    means = means.add_(0.3).round_().to(torch.uint8)
    # The exponent as the upper byte, whose difference wraps, and back with its sign.
    numbers = (words << 1).sub_(_spread(means, words.numel())).bitwise_right_shift_(8)
    signs = (words & 0x7F).bitwise_or_((words >> 8).bitwise_and_(0x80))
    counts, levels = [], []
    for _ in range(LEVELS):
        padded = torch.cat([numbers, numbers.new_zeros(-numbers.numel() % GRANULE)])
        levels.append(_CODES.pack(padded).view(torch.uint8))
        # Clamped and not compared: that takes ten times as long.
        further = (numbers + 1).to(torch.uint8).clamp_(2, 3).sub_(2).view(torch.bool)
        numbers = numbers.index_select(0, places(further))
        # Counted on from −2 and 2, which become 0 and 1.
        numbers = (numbers >> 15).mul_(-3).add_(numbers).sub_(1)
        counts.append(numbers.numel())
    rest = numbers.to(torch.int8).view(torch.uint8)
    return counts, [*levels, signs.to(torch.uint8), means, rest]


def sizes(numel: int, counts: list[int]) -> list[int]:
    """Bytes of each part of ``numel`` words."""
    told = [-(-count // GRANULE) * GRANULE // 4 for count in (numel, *counts[:-1])]
    return [*told, numel, -(-numel // _BLOCK), counts[-1]]


def read(parts: list[torch.Tensor], counts: list[int], out: torch.Tensor) -> bool:
    """Fill ``out`` (n, int16) with what ``write`` has made parts (uint8) and counts of.

    Returns whether it can have made them; if not, ``out`` is undefined.
    """
    *levels, signs, means, rest = parts
    numbers = rest.view(torch.int8).to(torch.int16)
    for count, level in zip([*counts[-2::-1], out.numel()], levels[::-1], strict=True):
        further = (numbers - 1).bitwise_right_shift_(15).mul_(3).add_(numbers).add_(1)
        numbers = _CODES.unpack(level.view(torch.int16))[:count]
        at = places((-1 - numbers).clamp_(0, 1).to(torch.uint8).view(torch.bool))
        if at.numel() != further.numel():
            return False
        numbers.index_copy_(0, at, further)
    exponents = numbers.bitwise_left_shift_(8).add_(_spread(means, out.numel()))
    # Back from the upper byte, without the sign that shifts in.
    exponents.bitwise_right_shift_(1).bitwise_and_(0x7F80)
    low = signs.to(torch.int16)
    torch.bitwise_or(low & 0x7F, (low << 8).bitwise_and_(-0x8000), out=out)
    out.bitwise_or_(exponents)
    return True


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """(n) as (⌈n / block⌉, block), the last filled up with its last value."""
    fill = values[-1:].expand(-values.numel() % _BLOCK)
    return torch.cat([values, fill]).view(-1, _BLOCK)


def _spread(means: torch.Tensor, numel: int) -> torch.Tensor:
    """The mean of each of ``numel`` numbers, as the upper byte (int16)."""
    upper = means.to(torch.int16).bitwise_left_shift_(8)
    return upper[:, None].expand(-1, _BLOCK).reshape(-1)[:numel]

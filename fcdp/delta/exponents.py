"""Floating-point numbers by themselves: exponents in few bits, signs and mantissas as they are.

Numbers near each other in a tensor are of one magnitude. Each block tells its mean exponent, and
each number how far it is from that, by Huffman codes: about 11 of bf16's 16 bits for gradients.
"""

from __future__ import annotations

import torch

from fcdp.delta import huffman

#: Numbers that share a mean exponent, and those of them that it is the mean of.
_BLOCK, _SAMPLED = 256, 32
#: Codes are chosen anew each 2^15 numbers: magnitudes differ from one parameter to the next.
_WINDOW = 15


def write(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponents of ``words`` (n, int16) as bytes (uint8), and the rest of them (n, uint8)."""
    # The sign goes below the mantissa: the upper byte is the exponent.
    rotated = (words << 1).sub_(words >> 15)
    rest = rotated.to(torch.uint8)
    distances = _blocks(rotated.bitwise_right_shift_(8).to(torch.uint8))
    means = distances[:, :_SAMPLED].float().mean(1).to(torch.uint8)
    distances -= means[:, None]
    return huffman.write([distances.view(-1)[: words.numel()], means], _WINDOW), rest


def read(told: torch.Tensor, rest: torch.Tensor, out: torch.Tensor) -> bool:
    """Fill ``out`` (n, int16) with what ``write`` has made both (uint8) of.

    Returns whether it can have made them; if not, ``out`` is undefined.
    """
    means = -(-out.numel() // _BLOCK)
    given = huffman.read(told, out.numel() + means)
    if given is None or given.numel() != out.numel() + means:
        return False
    exponents = _blocks(given[: out.numel()])
    exponents += given[out.numel() :, None]
    torch.bitwise_left_shift(exponents.view(-1)[: out.numel()].to(torch.int16), 8, out=out)
    out += rest
    signs = out << 15
    out.bitwise_right_shift_(1).bitwise_and_(0x7FFF).bitwise_or_(signs)
    return True


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """(n) as (⌈n / block⌉, block), a copy; the last is filled up with its last value."""
    fill = values[-1:].expand(-values.numel() % _BLOCK)
    return torch.cat([values, fill]).view(-1, _BLOCK)

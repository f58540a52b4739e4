"""Floating-point numbers by themselves: exponents in few bits, signs and mantissas as they are.

Numbers near each other in a tensor are of one magnitude. Each block tells its mean exponent, and
each number how far it is from that, by Huffman codes: about 11 of bf16's 16 bits for gradients.
"""

import torch

from fcdp.delta import huffman
from fcdp.delta.compiled import Bytes, Words, compiled

#: Numbers that share a mean exponent, and those of them that it is the mean of.
_BLOCK, _SAMPLED = 256, 32
#: Codes are chosen anew each 2^15 numbers: magnitudes differ from one parameter to the next.
_WINDOW = 15


def write(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponents of ``words`` (n, int16) as bytes (uint8), and the rest of them (n, uint8)."""
    distances, rest = torch.empty(2, words.numel(), dtype=torch.uint8, device="cpu")
    means = torch.empty(-(-words.numel() // _BLOCK), dtype=torch.uint8, device="cpu")
    _part(words.numpy(), distances.numpy(), means.numpy(), rest.numpy())
    return huffman.write([distances, means], _WINDOW), rest


def read(encoded: torch.Tensor, rest: torch.Tensor, out: torch.Tensor) -> bool:
    """Fill ``out`` (n, int16) with what ``write`` has made both (uint8) of.

    Returns whether it can have made them; if not, ``out`` is undefined.
    """
    means = -(-out.numel() // _BLOCK)
    decoded = huffman.read(encoded, out.numel() + means)
    if decoded is None or decoded.numel() != out.numel() + means:
        return False
    distances, means_of = decoded.split([out.numel(), means])
    _join(distances.numpy(), means_of.numpy(), rest.numpy(), out.numpy())
    return True


@compiled
def _part(words: Words, distances: Bytes, means: Bytes, rest: Bytes) -> None:
    """Write exponents as distances from their blocks' means; signs go below the mantissas."""
    for block in range(means.size):
        part = slice(block * _BLOCK, (block + 1) * _BLOCK)
        of, to, beside = words[part], distances[part], rest[part]
        total = 0
        for at in range(min(_SAMPLED, of.size)):
            total += of[at] >> 7 & 0xFF
        means[block] = total // min(_SAMPLED, of.size)
        for at in range(of.size):
            to[at] = (of[at] >> 7) - means[block]
        for at in range(of.size):
            beside[at] = of[at] << 1 | of[at] >> 15 & 1


@compiled
def _join(distances: Bytes, means: Bytes, rest: Bytes, out: Words) -> None:
    """Write the words of which :func:`_part` has made the others."""
    for block in range(means.size):
        for at in range(block * _BLOCK, min((block + 1) * _BLOCK, out.size)):
            exponent = distances[at] + means[block] & 0xFF
            out[at] = rest[at] << 15 | exponent << 7 | rest[at] >> 1

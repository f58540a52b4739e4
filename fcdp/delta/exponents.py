"""Floating-point numbers by themselves: exponents in few bits, signs and mantissas as they are.

Numbers near each other in a tensor are of one magnitude. Each block stores its mean exponent, and
each number its distance from that, in Huffman codes: about 11 of bf16's 16 bits for gradients.
"""

import torch

from fcdp.delta import huffman
from fcdp.delta.compiled import Bytes, Words, compiled

#: Numbers that share a mean exponent, and those of them that it is the mean of.
_BLOCK, _SAMPLED = 256, 32
#: Codes are chosen anew each 2^15 numbers: magnitudes differ from one parameter to the next.
_WINDOW = 15


def write(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the exponents of ``words`` (n, int16); return them and the rest (n), as uint8."""
    distances, rest = torch.empty(2, words.numel(), dtype=torch.uint8, device="cpu")
    means = torch.empty(-(-words.numel() // _BLOCK), dtype=torch.uint8, device="cpu")
    _part(words.numpy(), distances=distances.numpy(), means=means.numpy(), rest=rest.numpy())
    return huffman.write([distances, means], _WINDOW), rest


def read(encoded: torch.Tensor, rest: torch.Tensor, out: torch.Tensor) -> bool:
    """Decode both outputs (uint8) of ``write`` into ``out`` (n, int16).

    Returns whether they are valid; if not, ``out`` is undefined.
    """
    means = -(-out.numel() // _BLOCK)
    decoded = huffman.read(encoded, out.numel() + means)
    if decoded is None or decoded.numel() != out.numel() + means:
        return False
    distances, means_of = decoded.split([out.numel(), means])
    _join(distances.numpy(), means=means_of.numpy(), rest=rest.numpy(), out=out.numpy())
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
    """Write the words that :func:`_part` has taken apart."""
    for block in range(means.size):
        for at in range(block * _BLOCK, min((block + 1) * _BLOCK, out.size)):
            exponent = distances[at] + means[block] & 0xFF
            out[at] = rest[at] << 15 | exponent << 7 | rest[at] >> 1

"""Small numbers of which many are zero, in hardly more bytes than their entropy.

Each number that is not zero is one byte: how many zeros are before it, and whether it is 1, −1 or
another, which follows. Huffman codes make of these bytes what their frequencies allow: where few
words change as where most do.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fcdp.delta import huffman
from fcdp.delta.compiled import Bytes, Longs, Near, Words, compiled
from fcdp.delta.packing import BIT, DE_BRUIJN, HIGHEST_SIX, NONE, pack_flags

#: Zeros that one byte encodes. One more byte encodes up to as many runs of that length.
_RUN = 64
#: The two lowest bits of a byte: 1, −1, a number that follows, and no number but only zeros.
_OTHER, _ZEROS = 2, 3


class Sizes(NamedTuple):
    """Counts that a reader needs."""

    tokens: int
    #: Numbers that are neither 0 nor ±1.
    others: int
    #: Bytes of all that was written.
    nbytes: int


def write(numbers: torch.Tensor, window: int) -> tuple[Sizes, torch.Tensor]:
    """Encode ``numbers`` (n, int16), of which at least one is not zero, as bytes (uint8).

    ``window`` is that of :func:`huffman.write`.
    """
    if fill := -numbers.numel() % 64:
        numbers = F.pad(numbers, (0, fill))
    flags = pack_flags(numbers.to(torch.bool)).numpy().view(np.uint64)
    # A token of zeros encodes so many that there is at most one for each number.
    tokens = torch.empty(numbers.numel(), dtype=torch.uint8, device="cpu")
    near, wide = torch.empty_like(numbers, dtype=torch.int8), torch.empty_like(numbers)
    count, some, far = _tokenize(
        flags,
        numbers.numpy(),
        tokens=tokens.numpy(),
        near=near.numpy(),
        wide=wide.numpy(),
    )
    data = huffman.write([tokens[:count], near[:some], wide[:far]], window)
    return Sizes(count, some, data.numel()), data


def read(sizes: Sizes, data: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Decode ``data`` (uint8) into ``numbers`` (n, int16, all zero).

    Returns whether it is valid; if not, ``numbers`` is undefined.
    """
    tokens, others, _ = sizes
    if not (0 < tokens <= numbers.numel() and 0 <= others <= tokens):
        return False
    if (decoded := huffman.read(data, tokens + 3 * others)) is None:
        return False
    wide_bytes = decoded.numel() - tokens - others
    if wide_bytes < 0 or wide_bytes % 2:
        return False
    codes, near, wide = decoded.split([tokens, others, wide_bytes])
    near, wide = near.view(torch.int8), wide.clone().view(torch.int16)  # at an even place
    return _set(codes.numpy(), near=near.numpy(), wide=wide.numpy(), numbers=numbers.numpy())


@compiled
def _tokenize(
    flags: Longs, numbers: Words, tokens: Bytes, near: Near, wide: Words
) -> tuple[int, int, int]:
    """Write the tokens of ``numbers`` (n); ``flags`` (n / 64) have a bit for each that is not 0.

    Numbers that follow go to ``near``, and are 0 there if a byte does not hold them and they go to
    ``wide``. Returns how many tokens there are, and numbers in each.
    """
    count = some = far = 0
    last = -1
    for block in range(flags.size):
        left = flags[block]
        while left != NONE:
            lowest = left & (NONE - left)
            left ^= lowest
            at = 64 * block + BIT[lowest * DE_BRUIJN >> HIGHEST_SIX]
            zeros = at - last - 1
            last = at
            if zeros >= _RUN:
                runs = zeros // _RUN
                while runs > _RUN:
                    tokens[count] = _ZEROS | _RUN - 1 << 2
                    count += 1
                    runs -= _RUN
                tokens[count] = _ZEROS | runs - 1 << 2
                count += 1
            number = numbers[at]
            other = number * number != 1
            tokens[count] = (zeros & _RUN - 1) << 2 | (_OTHER if other else number < 0)
            count += 1
            # Written whether it follows, and then over: no branch that is guessed wrongly.
            near[some] = number
            if not -128 <= number <= 127:
                near[some] = 0
                wide[far] = number
                far += 1
            some += other
    return count, some, far


@compiled
def _set(tokens: Bytes, near: Near, wide: Words, numbers: Words) -> bool:
    """Set the ``numbers`` (n) of the tokens; return whether they fit, and all are used."""
    some = far = 0
    at = -1
    for token in tokens:
        kind, zeros = token & 3, token >> 2
        at += _RUN * (zeros + 1) if kind == _ZEROS else zeros + 1
        if at >= numbers.size:
            return False
        if kind < _OTHER:
            numbers[at] = 1 - 2 * kind
        elif kind == _OTHER:
            if some == near.size:
                return False
            numbers[at] = near[some]
            some += 1
            if numbers[at] == 0:
                if far == wide.size:
                    return False
                numbers[at] = wide[far]
                far += 1
    return some == near.size and far == wide.size


def by_magnitude(words: torch.Tensor) -> torch.Tensor:
    """Return the order of ``words`` (n, int16) by the exponents of their numbers.

    What an update changes depends on how large it is against the number: words of one exponent,
    one after the other, have frequencies of their own.
    """
    magnitudes = (words >> 7).to(torch.uint8)
    return torch.from_numpy(np.argsort(magnitudes.numpy(), kind="stable"))

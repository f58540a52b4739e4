"""Messages of one rank's shard to the ranks that hold an earlier version of it."""

import sys

import torch

from fcdp.checksum import checksum
from fcdp.delta import difference

#: Dtypes whose shards are sent as differences. Of four and eight bytes, all but the highest two are
#: sent as they are: an update changes them whatever its size.
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

#: The version that a difference leads from, and the checksum of the one that it leads to; of a
#: whole shard neither.
_PREAMBLE = torch.int64
_PREAMBLE_BYTES = 2 * _PREAMBLE.itemsize
_WHOLE = -1
#: In place of a version where a shard is encoded without one, in fewer bytes than it has.
ALONE = -2


def most_bytes(shard: torch.Tensor) -> int:
    """The most bytes that the message of a shard takes: about 1/65,000 more than the shard."""
    return _PREAMBLE_BYTES + _low_bytes(shard) + difference.capacity(shard.numel())


def whole(new: torch.Tensor) -> torch.Tensor:
    """Return the message of a whole shard (n, contiguous, on the host), which needs no base."""
    preamble = torch.tensor([_WHOLE, 0], dtype=_PREAMBLE, device="cpu")
    return torch.cat([preamble.view(torch.uint8), new.view(torch.uint8)])


def is_whole(message: torch.Tensor) -> bool:
    """Whether a message (uint8) can be read without a version of the shard."""
    return _preamble(message)[0] == _WHOLE


def write(
    new: torch.Tensor,
    base: torch.Tensor | None,
    version: int,
    *,
    coding: difference.Coding = "packed",
) -> torch.Tensor:
    """Encode the difference from ``base`` (n), which is ``version``, to ``new`` (n), as uint8.

    Both are contiguous, on the host, and of the same one of :data:`DTYPES`. Without ``base`` the
    version is :data:`ALONE`.
    """
    preamble = torch.tensor([version, int(checksum(new))], dtype=_PREAMBLE, device="cpu")
    parts = [preamble.view(torch.uint8)]
    now = new.view(torch.int16)
    before = None if base is None else base.view(torch.int16)
    if new.itemsize > 2:
        low, now = low_and_high(now, new.itemsize)
        now = packed(now)
        if before is not None:
            before = packed(low_and_high(before, new.itemsize)[1])
        parts.append(packed(low).view(torch.uint8))
        parts.append(preamble.view(torch.uint8)[: _low_bytes(new) - 2 * low.numel()])  # fills up
    return torch.cat([*parts, difference.encode(now, before, coding)])


def read(message: torch.Tensor, row: torch.Tensor, version: int) -> bool:
    """Apply ``message`` to ``row`` (n, contiguous), which is ``version``, in place.

    Returns whether it was a difference. ``message`` (uint8) may be longer than what was written.
    Raises ``ValueError`` for one that leads from another version, and for one that was damaged.
    """
    base, expected = _preamble(message)
    if base == _WHOLE:
        _check_length(message, row.nbytes)
        row.copy_(message[_PREAMBLE_BYTES : _PREAMBLE_BYTES + row.nbytes].view(row.dtype))
        return False
    if base != version:
        raise ValueError(f"a difference from version {base} of a shard, of which {version} is here")
    words, rest = row.view(torch.int16), message[_PREAMBLE_BYTES:]
    if row.itemsize > 2:
        low, high = low_and_high(words, row.itemsize)
        _check_length(message, _low_bytes(row))
        low.copy_(rest[: 2 * low.numel()].view(torch.int16).view(low.shape))
        changed = packed(high)
        difference.apply(rest[_low_bytes(row) :], changed)
        high.copy_(changed)
    else:
        difference.apply(rest, words)
    if int(checksum(row)) != expected:
        raise ValueError("a difference between versions of a shard: leads to another checksum")
    return True


def _preamble(message: torch.Tensor) -> list[int]:
    _check_length(message, 0)
    return [int(number) for number in message[:_PREAMBLE_BYTES].view(_PREAMBLE).tolist()]


def _check_length(message: torch.Tensor, nbytes: int) -> None:
    if message.numel() < _PREAMBLE_BYTES + nbytes:
        raise ValueError("a difference between versions of a shard: cut on its way")


def low_and_high(words: torch.Tensor, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split off the highest two bytes (n) of each number from the rest (n, itemsize / 2 − 1)."""
    assert sys.byteorder == "little"
    table = words.view(-1, itemsize // 2)
    return table[:, :-1], table[:, -1]


def packed(words: torch.Tensor) -> torch.Tensor:
    """Copy words to adjacent ones: torch takes a view of one word for contiguous already."""
    packed = words.new_empty(words.numel())
    packed.view(words.shape).copy_(words)
    return packed


def _low_bytes(shard: torch.Tensor) -> int:
    """Bytes that come before the difference, which begins at a multiple of four."""
    nbytes = shard.numel() * (shard.itemsize - 2)
    return nbytes + -nbytes % 4

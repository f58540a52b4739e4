"""Files read and written past the page cache, checked by the checksums of what was written.

The memory is an arena's, whose pieces are aligned as direct I/O needs them. Transfers are plain
functions, so that a thread does not keep its caller alive.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from fcdp.checksum import bytes_of, checksum


class File:
    """An open file, closed with the last use of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def write(file: File, offset: int, memory: torch.Tensor, *, landed: Sequence[Any] = ()) -> int:
    """Write all of ``memory`` (uint8) once the device has filled it; return its checksum."""
    for event in landed:
        event.synchronize()
    total = int(checksum(memory))
    write_all(file.descriptor, offset, memory)
    return total


def read(
    file: File, offset: int, memory: torch.Tensor, *, expected: int, landed: Sequence[Any] = ()
) -> int:
    """Fill all of ``memory`` (uint8) once the device has read it; return its checksum.

    Raises ``OSError`` if that is not what was written.
    """
    for event in landed:
        event.synchronize()
    read_all(file.descriptor, offset, memory)
    if int(checksum(memory)) != expected:
        raise OSError(errno.EIO, "the file holds other bytes than were written")
    return expected


def write_all(descriptor: int, offset: int, memory: torch.Tensor) -> None:
    """Write all of ``memory`` (uint8). Raises ``OSError`` where that fails."""
    view, done = bytes_of(memory), 0
    while done < len(view):
        done += _whole(os.pwritev(descriptor, [view[done:]], offset + done))


def read_all(descriptor: int, offset: int, memory: torch.Tensor) -> None:
    """Fill all of ``memory`` (uint8). Raises ``OSError`` for a file that ends before."""
    view, done = bytes_of(memory), 0
    while done < len(view):
        moved = os.preadv(descriptor, [view[done:]], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the file is shorter than what was written")
        done += _whole(moved)


def _whole(moved: int) -> int:
    """Refuse a size that is not a multiple of a page, which direct I/O cannot continue from."""
    if moved % mmap.PAGESIZE:
        raise OSError(errno.ENOSPC, "a transfer ended early")
    return moved

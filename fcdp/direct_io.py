"""Files read and written past the page cache, checked by the checksums of what was written.

The memory is an arena's, whose pieces are aligned as direct I/O needs them. Transfers are plain
functions, so that a thread does not keep its caller alive.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fcdp.checksum import bytes_of, checksum
from fcdp.sizes import in_words


class File:
    """An open file, closed with the last use of it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def open_alone(path: Path, field: str, *, direct: bool = True) -> File:
    """Open the file at ``path`` past the page cache and lock it; make it if it is not there.

    ``field`` names the option that chose its folder. Raises ``ValueError`` for a folder
    that cannot be written or is in use, and where there is no direct I/O unless that need not be.
    """
    flags = os.O_RDWR | os.O_CREAT
    try:
        try:
            file = File(os.open(path, flags | os.O_DIRECT, 0o600))
        except OSError:
            if direct:
                raise
            file = File(os.open(path, flags, 0o600))
        fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{field} = {str(path.parent)!r}: another process has it") from error
    except OSError as error:
        raise ValueError(
            f"{field} = {str(path.parent)!r}: must be a folder that can be written"
            f"{' with direct I/O' * direct} ({error.strerror})"
        ) from error
    return file


def left_over(path: Path) -> bool:
    """Whether ``path`` is a file of ``open_alone`` that no process has open any more."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def reserve(file: File, start: int, end: int, *, path: Path, field: str) -> None:
    """Reserve these bytes of the file now, so that no later write runs out of space.

    Raises ``ValueError`` where it has no room.
    """
    if end <= start:
        return
    try:
        os.posix_fallocate(file.descriptor, start, end - start)
    except OSError as error:
        raise ValueError(
            f"{field} = {str(path.parent)!r}: {in_words(end - start)} are needed "
            f"({error.strerror}); nothing of what was there has been changed"
        ) from error


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

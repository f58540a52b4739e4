"""Files on an SSD that one process at a time has open, reserved before anything is written."""

import fcntl
import os
from pathlib import Path

from fcdp.direct_io import File
from fcdp.sizes import in_words


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

"""Small files, replaced whole: on the disk when a function returns, or as they were."""

import os
import zlib
from contextlib import suppress
from pathlib import Path

#: The file of a checkpoint that is replaced when the rest is complete. It is named in this module
#: because launchers look for it without importing torch.
COMMIT = "state.pt"
_MARK = b"fcdp crc32 "
_DIGITS = 8
#: Bytes that a seal adds.
SEAL_BYTES = len(_MARK) + _DIGITS


def flush(path: Path) -> None:
    """Flush a file's contents, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Replace a file's contents: it has the new ones or the old ones, whatever happens.

    Raises:
        OSError: If it cannot be written; it is then as it was.
    """
    draft = path.with_name(f"{path.name}.new")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # it counts already, also where folders cannot be flushed
        flush(path.parent)


def sealed(data: bytes) -> bytes:
    """The data, and at its end the checksum of all before it."""
    return data + _MARK + _digits(data + _MARK)


def unsealed(data: bytes, path: Path) -> bytes:
    """Return what was sealed. Raises ``ValueError`` if that is not what ``path`` has."""
    body, digits = data[:-_DIGITS], data[-_DIGITS:]
    if not body.endswith(_MARK):
        raise ValueError(
            f"{path}: damaged: has {len(data)} bytes and no checksum at its end; it was cut or "
            "overwritten, or written by a version of FCDP without checksums, which must read it"
        )
    if (expected := _digits(body)) != digits:
        raise ValueError(
            f"{path}: damaged: its CRC-32 is {expected.decode()}; "
            f"must be {digits.decode(errors='replace')}, as saved"
        )
    return body.removesuffix(_MARK)


def _digits(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)

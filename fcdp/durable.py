"""Small files that are on the disk when a function returns, all of them or as they were."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have a file's contents, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, text: str) -> None:
    """Have the file say this, or what it said before, whatever happens meanwhile.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    flush(path.parent)

"""Where a command writes, checked before work starts that a wrong path would waste."""

from __future__ import annotations

from pathlib import Path


def check(option: str, file: Path) -> None:
    """Make the file's folder; raises ``ValueError`` if the file cannot be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        file.open("ab").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{option} = {str(file)!r}: cannot be written: {error}") from error

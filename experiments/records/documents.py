"""The texts of users' files, for those who check them and those who train on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def digest(file: Path) -> str:
    """SHA-256 of the file's content, in hexadecimal."""
    found = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(2**20):
            found.update(part)
    return found.hexdigest()


def json_lines(file: Path, field: str) -> Iterator[str]:
    """The texts of a file of one JSON object per line; empty lines are passed over.

    Raises ``ValueError`` naming file and line where there is no such object or no text in it.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text(line, field, f"{file.name}:{number}")


def _text(line: bytes, field: str, where: str) -> str:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: is no JSON object")
    return text_of(found, field, where)


def text_of(found: dict[str, Any], field: str, where: str) -> str:
    """The text of an object. Raises ``ValueError`` where the field is missing or no text."""
    if field not in found:
        raise ValueError(f"{where}: has no field {field!r}, only {', '.join(map(repr, found))}")
    text = found[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {field} is a {type(text).__name__}, not text")
    return text

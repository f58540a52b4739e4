"""Types that are kept in files and allow nothing unknown, and JSON Lines files of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

#: A part of a cell's id, and so of its directory's name: no separators, no spaces, not too long.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]

#: Levels of lists and objects in a line; records have half as many.
_DEEPEST = 20


class Strict(BaseModel):
    """Base of every file-backed type: an unknown key is an error, and nothing changes later."""

    # A diverged loss is NaN. As pydantic's default, null, it could not be read back as a number;
    # as the string "NaN" it can, and the line stays standard JSON.
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), ser_json_inf_nan="strings"
    )


AnyStrict = TypeVar("AnyStrict", bound=Strict)


def append(record: Strict, path: Path) -> None:
    """Append one line to a JSON Lines file and flush it to the disk: all of it or nothing.

    A torn last line, which a killed run leaves, is cut off first. If the line cannot be written
    (a full disk), the file is as it was before and the ``OSError`` is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = record.model_dump_json().encode() + b"\n"
    # Unbuffered, so that nothing is left to be written when the file is closed after an error.
    with path.open("r+b" if path.exists() else "x+b", buffering=0) as file:
        end = _end_of_complete_lines(file.read() or b"")
        file.truncate(end)
        file.seek(end)
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:]) or 0
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def read_as(path: Path, kind: type[AnyStrict]) -> list[AnyStrict]:
    """Read a JSON Lines file of records of one ``kind``.

    A last line without its newline is what a killed run leaves; it is dropped, so that the cell
    runs again. Any other malformed line raises ``ValueError`` with its file and line number.
    """
    content = path.read_bytes()
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it splits at.
    lines = content[: _end_of_complete_lines(content)].split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            _check_depth(found, _DEEPEST)
            records.append(kind.model_validate(found))
        except RecursionError as error:  # json's own
            raise ValueError(f"{path}:{number}: not a record: nested too deeply") from error
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: not a record of this version: {problem(error)}"
            ) from error
    return records


def _check_depth(value: Any, left: int) -> None:
    """Raise ``ValueError`` for what is nested deeper than any record: a file may be anybody's."""
    if not left:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, left - 1)


def problem(error: ValueError) -> str:
    """The error in one line, without the values, which may be a whole file."""
    if not isinstance(error, ValidationError):
        return str(error)
    first, *others = error.errors(include_input=False, include_url=False)
    where = ".".join(map(str, first["loc"]))
    more = f", and {len(others)} more" if others else ""
    return f"{where}: {first['msg']}{more}"


def _end_of_complete_lines(content: bytes) -> int:
    return content.rfind(b"\n") + 1

"""Types of what files hold, which refuse unknown keys; JSON Lines and CSV files of them.

    python -m simulation.files FOLDER ...

compresses long files of records below these: a file is either ``NAME.jsonl`` or ``NAME.jsonl.gz``,
and whoever names the first reads the second as well.
"""

import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fcdp.durable import replace

#: A part of a cell's id, and so of its directory's name: no separators, no spaces, not too long.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]

#: Control characters except tab and newline; and those that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: Levels of lists and objects in a line; records have half as many.
_DEEPEST = 20

#: Bytes of the longest file that is not compressed, so that it can be read as it is.
LONGEST = 200_000
_COMPRESSED = ".gz"


class Strict(BaseModel):
    """Base of every file-backed type: an unknown key is an error, and instances are frozen."""

    # A diverged loss is NaN. As pydantic's default, null, it could not be read back as a number;
    # as the string "NaN" it can, and the line stays standard JSON.
    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), ser_json_inf_nan="strings"
    )


AnyStrict = TypeVar("AnyStrict", bound=Strict)


def now() -> str:
    """This second, as records have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append(record: Strict, path: Path) -> None:
    """Append one line to a JSON Lines file and flush it to the disk: all of it or nothing.

    A torn last line, which a killed run leaves, is cut off first. If the line cannot be written
    (a full disk), the file is as it was before and the ``OSError`` is raised. A compressed file
    is written out, as more lines may follow.
    """
    path, compressed = _forms(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if stored(path) == compressed:
        replace(path, _content(compressed))
        compressed.unlink()
    line = record.model_dump_json().encode() + b"\n"
    # Unbuffered, so that nothing is left to be written when the file is closed after an error.
    with path.open("r+b" if path.exists() else "x+b", buffering=0) as file:
        end = (file.read() or b"").rfind(b"\n") + 1  # of complete lines
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


def write(records: Iterable[Strict], path: Path) -> None:
    """Write a JSON Lines file in place of what there was, if any: all of it or nothing."""
    path, compressed = _forms(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, b"".join(record.model_dump_json().encode() + b"\n" for record in records))
    compressed.unlink(missing_ok=True)


def compress(path: Path) -> Path:
    """Leave a file in one form, compressed where it is long; return its path."""
    path, compressed = _forms(path)
    if stored(path) == compressed:
        return compressed
    content = path.read_bytes()
    if len(content) <= LONGEST:
        compressed.unlink(missing_ok=True)  # of older records, which these replace
        return path
    packed = io.BytesIO()
    # Without a name and a time, so that the same records are the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:
        file.write(content)
    replace(compressed, packed.getvalue())
    path.unlink()
    return compressed


def stored(path: Path) -> Path:
    """The path of a file: the compressed one if only that exists, else the plain one."""
    path, compressed = _forms(path)
    return compressed if compressed.is_file() and not path.exists() else path


def below(folder: Path, name: str) -> list[Path]:
    """Paths of all files of a name below a folder, compressed or not; in order."""
    paths = {path.with_name(name) for end in ("", ".gz") for path in folder.rglob(f"{name}{end}")}
    return [stored(path) for path in sorted(paths)]


def lines(path: Path) -> list[bytes]:
    """The lines of a file, compressed or not, without a last one that lacks its newline.

    Raises ``ValueError`` for what is compressed and cut short.
    """
    content = _content(stored(path))
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it splits at.
    return content.split(b"\n")[:-1]


def read_as(path: Path, kind: type[AnyStrict]) -> list[AnyStrict]:
    """Read a JSON Lines file of records of one ``kind``, compressed or not.

    A last line without its newline is what a killed run leaves; it is dropped, so that the cell
    runs again. Any other malformed line raises ``ValueError`` with its file and line number.
    """
    records = []
    for number, line in enumerate(lines(path), start=1):
        try:
            records.append(kind.model_validate(_checked(json.loads(line), _DEEPEST)))
        except RecursionError as error:  # json's own
            raise ValueError(f"{stored(path)}:{number}: not a record: nested too deeply") from error
        except ValueError as error:
            raise ValueError(
                f"{stored(path)}:{number}: not a record of this version: {problem(error)}"
            ) from error
    return records


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of a CSV file without empty fields, each after its place: ``FILE:LINE``."""
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            yield f"{path}:{number}", {key: value for key, value in row.items() if value}


def validated(kind: type[AnyStrict], values: Any, where: str) -> AnyStrict:
    """The values as a ``kind``. Raises ``ValueError`` that says where they are."""
    try:
        return kind.model_validate(values)
    except ValueError as error:
        raise ValueError(f"{where}: {problem(error)}") from error


def _forms(path: Path) -> tuple[Path, Path]:
    """A file's plain path and its compressed one, by either of them."""
    path = path.with_suffix("") if path.suffix == _COMPRESSED else path
    return path, path.with_name(f"{path.name}{_COMPRESSED}")


def _content(path: Path) -> bytes:
    if path.suffix != _COMPRESSED:
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be decompressed: {error}") from error


def _checked(value: Any, left: int) -> Any:
    """The value without control characters in its texts: a file may come from anybody.

    Raises ``ValueError`` for what is nested deeper than any record.
    """
    if not left:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        return {_CONTROL.sub("�", key): _checked(each, left - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_checked(each, left - 1) for each in value]
    return _CONTROL.sub("�", value) if isinstance(value, str) else value


def problem(error: ValueError) -> str:
    """The error in one line, without the values, which may be a whole file."""
    if not isinstance(error, ValidationError):
        return str(error)
    first, *others = error.errors(include_input=False, include_url=False)
    where = ".".join(map(str, first["loc"]))
    more = f", and {len(others)} more" if others else ""
    return f"{where}: {first['msg']}{more}"


def main(folders: Sequence[str]) -> None:
    """Compress long files below these folders, and print their paths."""
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.jsonl")):
            if (compressed := compress(path)) != path:
                print(compressed)


if __name__ == "__main__":
    main(sys.argv[1:])

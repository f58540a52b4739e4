"""Golden files beside the tests: tables, and cases in lines, with what they come to below.

They are written by hand, unless a test's module says that it writes its file anew.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def cases(file: Path) -> dict[str, list[str]]:
    """List what each case of the file comes to, by the line of the case."""
    found: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            found[[*found][-1]].append(line.strip())
        else:
            assert line not in found, f"{line} is there twice"
            found[line] = []
    return found


def tables(test: str) -> Any:
    """The tables of a test's file, which lie beside it under its own name."""
    file = Path(test)
    name = file.stem.removeprefix("test_")
    return yaml.safe_load(file.with_name(f"{name}.yaml").read_text(encoding="utf-8"))


def read(case: str) -> tuple[str, Any]:
    """The name with which a case begins, and the value after it as YAML has it."""
    name, _, value = case.partition(" ")
    return name, yaml.safe_load(value)


def check_refused(case: str, lines: list[str], asked: Callable[[str, Any], object]) -> None:
    """Check the error of ``asked(*read(case))``: how it begins, and what else is in it."""
    import pytest  # here, as ranks read tables and need no pytest

    begins, *parts = lines
    with pytest.raises(ValueError, match=f"^{re.escape(begins)}") as error:
        asked(*read(case))
    assert [part for part in parts if part not in str(error.value)] == []

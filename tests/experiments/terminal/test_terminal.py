"""A destination is refused before the work, and nothing is left of the check."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import terminal


def test_a_new_file_gets_its_folder_and_is_not_made(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "file.json"
    terminal.check_writable("--json", file)
    assert list(tmp_path.rglob("*")) == [file.parent]


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}")
    terminal.check_writable("--json", file)
    assert file.read_text() == "{}"


@pytest.mark.parametrize("path", [".", "file", "file/below.json", "file/far/below.json"])
def test_what_cannot_be_written_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").mkdir() if path == "file" else (tmp_path / "file").touch()
    wrong = tmp_path / path
    with pytest.raises(ValueError, match=f"^--json = '{wrong}': cannot be written: "):
        terminal.check_writable("--json", wrong)

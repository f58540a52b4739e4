"""Files that are replaced whole, or stay as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fcdp import durable


def test_a_file_says_the_new_text_and_no_draft_stays(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    for data in (b"first", b"second"):
        durable.replace(file, data)
        assert file.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_a_file_that_cannot_be_written_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "step.json"
    durable.replace(file, b"first")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        durable.replace(file, b"second")
    assert file.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_what_counts_already_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system flushes no folders: who hears of a failure removes what it names."""
    monkeypatch.setattr(durable, "flush", lambda path: os.fsync(9999))
    durable.replace(tmp_path / "step.json", b"first")
    assert (tmp_path / "step.json").read_bytes() == b"first"

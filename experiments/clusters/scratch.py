"""Folders for the files of one job that nobody reads after it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.clusters import owners


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, removed afterwards, as are those that killed processes left before."""
    _remove_stale()
    with tempfile.TemporaryDirectory(prefix=f"{owners.new_prefix()}-") as name:
        yield Path(name)


def _remove_stale() -> None:
    for path in Path(tempfile.gettempdir()).iterdir():
        if owners.is_orphan(path.name):
            # Another cluster that starts now may remove it too; another user's stays.
            shutil.rmtree(path, ignore_errors=True)

"""Folders for files that nobody reads after the job, or the process, that they are for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.clusters import owners

#: The directory for temporary files wherever ``TMPDIR`` does not name one.
_USUAL = "/tmp"
#: A socket's path has at most 107 bytes; this many are left beside our folder's name and
#: "/pymp-xxxxxxxx/listener-xxxxxxxx", which multiprocessing adds.
_LONGEST_FOR_SOCKETS = 27


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, removed afterwards, as are those that killed processes left before."""
    _remove_stale()
    with tempfile.TemporaryDirectory(prefix=f"{owners.new_prefix()}-") as name:
        yield Path(name)


def new_folder_for_sockets() -> Path:
    """An empty folder with a short path, for the caller to remove when this process ends.

    A later process removes it if this one is killed.
    """
    _remove_stale()
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_FOR_SOCKETS:
        parent = _USUAL
    return Path(tempfile.mkdtemp(prefix=f"{owners.new_prefix()}-", dir=parent))


def _remove_stale() -> None:
    for parent in {tempfile.gettempdir(), _USUAL}:
        for path in Path(parent).glob("*"):
            if owners.is_orphan(path.name):
                # Another cluster that starts now may remove it too; another user's stays.
                shutil.rmtree(path, ignore_errors=True)

"""The fork server's socket, which is removed with the process that it is of, or by the next."""

import signal
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.clusters import lifetimes
from tests import programs

START = """
import os, sys
from multiprocessing import util
from experiments.clusters import preload
preload.start(["json"])
print(util.get_temp_dir(), flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
"""
NO_SIGNAL = 0


def folder_of_sockets(temporary: Path, last_signal: int) -> Path:
    """The socket's folder, of a process that sent itself this signal at its end."""
    done = programs.ended(sys.executable, "-c", START, last_signal, TMPDIR=str(temporary))
    assert done.stdout, done.stderr
    assert done.returncode == -last_signal
    return Path(done.stdout.strip()).parent


@pytest.mark.parametrize("name", ["short", "l" * 90])
def test_it_is_removed_with_the_process_or_by_the_next(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        temporary = Path(above, name)
        temporary.mkdir()
        assert not folder_of_sockets(temporary, NO_SIGNAL).exists()
        left = folder_of_sockets(temporary, signal.SIGKILL)
        assert lifetimes.is_orphan(left.name)
        assert left.exists()
        assert (left.parent == temporary) == (name == "short")
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with lifetimes.folder() as folder:
            assert not left.exists()
            assert list(temporary.iterdir()) == [folder]

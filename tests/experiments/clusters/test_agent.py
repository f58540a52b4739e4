"""A node's part of a launch: files, and the fork server's socket."""

import signal
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.clusters import lifetimes
from experiments.clusters.interface import Launch
from experiments.clusters.launch import Node
from experiments.clusters.node import Order, _arguments
from tests import programs


def order(*arguments: str, files: dict[str, str]) -> Order:
    return Order(
        node=Node(node=1, nodes=2, ranks_per_node=1, master_address="", port=29500, environment={}),
        address="127.0.0.1",
        launch=Launch(entry="tests:none", arguments=arguments, logs=Path("logs"), timeout_s=1.0),
        files=files,
        marker="marker",
    )


@pytest.mark.parametrize("there", [None, b"of an earlier run", b"\xff"])
def test_ranks_read_what_the_runner_sent_and_no_older_file(
    there: bytes | None, tmp_path: Path
) -> None:
    cell = tmp_path / "cell.json"
    if there is not None:
        cell.write_bytes(there)
    found = _arguments(order(str(cell), "text", files={str(cell): "of this run, é"}), tmp_path)
    assert found[1] == "text"
    assert Path(found[0]).read_text(encoding="utf-8") == "of this run, é"
    assert found[0] != str(cell)


def test_a_file_that_is_the_runners_own_is_read_where_it_is(tmp_path: Path) -> None:
    cell = tmp_path / "cell.json"
    cell.write_text("of this run", encoding="utf-8")
    given = order(str(cell), files={str(cell): "of this run"})
    assert _arguments(given, tmp_path) == (str(cell),)


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
    """Where the socket was in a process that sent itself this signal before it ended."""
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

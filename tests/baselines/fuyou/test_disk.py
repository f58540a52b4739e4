"""What is counted of transfers while some are under way."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from baselines.fuyou import disk
from baselines.fuyou.disk import Disk
from fcdp.arena import Arena
from fcdp.direct_io import open_alone

pytestmark = pytest.mark.unit


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_seconds_of_transfers_that_go_on_count(tmp_path: Path) -> None:
    """A step whose SSD never rests has begun and ended between two ends of transfers."""
    clock, begun, go_on = _Clock(), threading.Event(), threading.Event()
    write = os.pwritev

    def held(*arguments: object) -> int:
        begun.set()
        assert go_on.wait(60)
        return write(*arguments)  # type: ignore[arg-type]

    made = Disk()
    memory = Arena(2**13, torch.device("cpu")).memory
    file = open_alone(tmp_path / "file", "ssd")
    with mock.patch.object(disk, "time", clock), mock.patch("os.pwritev", held):
        writing = made.write(file, 0, memory)
        assert begun.wait(60)
        clock.now = 3.0
        assert made.moved("write") == (0, 3.0)
        go_on.set()
        writing.result()
        made.close()
    clock.now = 5.0
    assert made.moved("write") == (2**13, 3.0)
    assert made.moved("read") == (0, 0.0)


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    """Another process may have opened the folder since."""
    made = Disk()
    file = open_alone(tmp_path / "file", "ssd")
    memory = Arena(2**13, torch.device("cpu")).memory
    made.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        made.write(file, 0, memory)
    assert (tmp_path / "file").stat().st_size == 0

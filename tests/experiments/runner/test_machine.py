"""Looks at a cell that runs: its last step, and what the host takes of the processors."""

import math
from pathlib import Path

import psutil
import pytest

from experiments.runner import runner
from experiments.runner.directory import Step, last_step
from experiments.worker import PROGRESS


def counters(file: Path, idle: int, steal: int) -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice, in jiffies
    file.write_text(f"cpu  100 0 50 {idle} 0 0 0 {steal} 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")


def test_steal_is_a_share_of_the_time_that_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    counters(stat, idle=1000, steal=10)
    runner.machine(0.5)
    counters(stat, idle=1060, steal=50)
    found = runner.machine(0.5)
    assert (found.load, found.steal_share) == (0.5, pytest.approx(0.4))
    # Each call begins anew.
    counters(stat, idle=1160, steal=50)
    assert runner.machine(0.5).steal_share == 0.0


def test_this_machine_can_be_watched() -> None:
    found = runner.look()
    assert found.cores >= 1
    assert 0 <= found.steal_share <= 1


def test_the_last_step_is_of_a_complete_line(tmp_path: Path) -> None:
    file = tmp_path / PROGRESS
    assert last_step(tmp_path) is None
    line = '{"step": 1, "of": 2, "loss": 5.0, "seconds": 0.5, "at": 0.0}\n'
    for torn in ("", line[:20]):
        file.write_text(torn)
        assert last_step(tmp_path) is None
    for torn in ("", line[:20]):
        file.write_text(line + torn)
        assert last_step(tmp_path) == Step(1, 2, 5.0, 0.5, 0.0)
    file.write_text(line + '{"step": 2, "of": 2, "loss": NaN, "seconds": 0.5, "at": 0.0}\n{"st')
    last = last_step(tmp_path)
    assert last.step == 2
    assert math.isnan(last.loss)

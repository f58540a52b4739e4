"""The time that is left, and checks of destinations; ``test_screens`` has the display."""

from pathlib import Path

import pytest

from experiments import terminal
from experiments.runner.directory import Step
from experiments.terminal.progress import clock, seconds_left
from tests.experiments.stand_in import cell, record


def test_time_left_goes_by_the_link_and_by_the_cell_that_runs() -> None:
    slow, fast = 10**7, 10**8
    finished = [
        record(cell(inter_bandwidth_bits_per_s=link)).model_copy(update={"seconds": seconds})
        for link, seconds in ((slow, 90.0), (slow, 110.0), (fast, 10.0))
    ]
    remaining = [cell(inter_bandwidth_bits_per_s=link) for link in (slow, fast, None)]
    assert seconds_left(remaining, finished, elapsed=30.0) == pytest.approx(70 + 10 + 70)
    assert seconds_left(remaining, finished, elapsed=500.0) == pytest.approx(10 + 70)
    assert seconds_left(remaining, [], elapsed=1.0) is None
    remaining = [cell(inter_bandwidth_bits_per_s=link) for link in (slow, slow, fast)]
    step = Step(step=2, of=10, loss=1.0, seconds=5.0, at=0.0)
    # Eight steps are left of it; the others are taken for alike, with what it took to start.
    assert seconds_left(remaining, [], 20.0, step) == pytest.approx(40 + 60 + 60)
    assert seconds_left(remaining, finished[2:], 20.0, step) == pytest.approx(40 + 60 + 10)
    assert [*map(clock, (0, 59.6, 151, 3751))] == ["0:00", "1:00", "2:31", "1:02:31"]


def test_a_look_whether_a_file_can_be_written_writes_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "deep" / "new.json"
    old.write_text("{}")
    for file in (old, new):
        terminal.check_writable("--json", file)
    assert old.read_text() == "{}"
    assert set(tmp_path.rglob("*")) == {old, new.parent}

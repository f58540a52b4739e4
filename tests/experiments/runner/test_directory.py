"""What a run's directory says of the cell that is under way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.runner.directory import Step, last_step
from experiments.worker import PROGRESS

pytestmark = pytest.mark.unit


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

"""The bound of memory and bandwidth as a run: what claims are compared with."""

from pathlib import Path

import pytest

from analysis.load import runs
from tests.experiments.command_line import printed


def test_the_committed_points_are_what_the_command_finds(
    committed: list[runs.AnyRun], tmp_path: Path
) -> None:
    (tmp_path / "bound").mkdir()
    # The command replaces this file, and does not append to it.
    (tmp_path / "bound" / "bound.jsonl").write_text("of an earlier time\n")
    printed("bound", "--output", tmp_path / "bound")
    (found,) = runs.load(tmp_path)
    bound = next(run for run in committed if run.matrix == "bound")
    assert [row.settings for row in bound.rows] == [row.settings for row in found.rows]
    for ours, theirs in zip(found.rows, bound.rows, strict=True):
        assert ours.quantities == pytest.approx(dict(theirs.quantities))

"""The bound of memory and bandwidth as a run: what claims are compared with."""

import pytest

from analysis.load import runs
from analysis.load.runs import Study
from tests.experiments.command_line import printed


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    results = tmp_path_factory.mktemp("results")
    (results / "bound").mkdir()
    # The command replaces this file, and does not append to it.
    (results / "bound" / "bound.jsonl").write_text("of an earlier time\n")
    printed("bound", "--output", results / "bound")
    (run,) = runs.load(results)
    assert isinstance(run, Study)
    return run


def test_the_committed_points_are_what_the_command_finds(
    study: Study, committed: list[runs.AnyRun]
) -> None:
    bound = next(run for run in committed if run.matrix == "bound")
    assert [row.settings for row in bound.rows] == [row.settings for row in study.rows]
    for ours, theirs in zip(study.rows, bound.rows, strict=True):
        assert ours.quantities == pytest.approx(dict(theirs.quantities))

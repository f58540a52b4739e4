"""The bound of memory and bandwidth as a run: what claims are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis.claims import papers
from analysis.claims.verdicts import judge
from analysis.load import runs
from analysis.load.runs import BoundStudy
from experiments.__main__ import app


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> BoundStudy:
    results = tmp_path_factory.mktemp("results")
    result = CliRunner().invoke(app, ["bound", "--output", str(results / "bound")])
    assert result.exit_code == 0, result.output
    (found,) = runs.load(results)
    assert isinstance(found, BoundStudy)
    return found


def test_a_row_has_the_size_the_link_and_the_bound(study: BoundStudy) -> None:
    row = next(row for row in study.rows if row.settings["model"] == "66B")
    assert row.settings["link"] == "100 Gbit/s"
    assert row.evidence == "simulated"
    assert row.quantities["hfu_bound"] == pytest.approx(0.76, rel=0.01)
    assert row.quantities["parameters_over_named"] == pytest.approx(64.4 / 66, rel=0.01)


def test_it_says_what_it_is(study: BoundStudy) -> None:
    assert study.resources == "12 points"
    assert study.summary.startswith("A closed form, simulated · 1.3B, 7B, 13B, 66B, 175B, 310B · ")
    assert [name for name, _ in study.origin] == ["Commit"]


def test_the_papers_vectors_are_judged_by_it(study: BoundStudy) -> None:
    found = judge(papers.load(), {study.matrix: study.rows})
    vectors = [
        f for f in found if f.claim.paper == "fsdp-bound" and f.claim.where.endswith("vectors")
    ]
    assert len(vectors) == 6
    assert {finding.verdict for finding in vectors} == {"consistent"}  # a formula, with itself
    assert {finding.evidence for finding in vectors} == {"simulated"}


def test_the_committed_points_are_what_the_command_finds(study: BoundStudy) -> None:
    results = Path(__file__).parents[3] / "results"
    committed = next(run for run in runs.load(results) if run.matrix == "bound")
    assert [row.settings for row in committed.rows] == [row.settings for row in study.rows]
    for ours, theirs in zip(study.rows, committed.rows, strict=True):
        assert ours.quantities == pytest.approx(dict(theirs.quantities))

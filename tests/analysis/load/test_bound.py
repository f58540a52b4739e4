"""The bound of memory and bandwidth as a run: what claims are compared with."""

import pytest

from analysis.claims import papers
from analysis.claims.verdicts import judge
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


def test_memory_is_worth_what_bandwidth_is_which_is_enough_where_the_bound_is_one(
    study: Study,
) -> None:
    for record in study.records:
        assert record.gains.twice_bandwidth == pytest.approx(2)
        assert record.gains.twice_free_memory == pytest.approx(2)
        assert record.gains.longer_sequences > 1 > record.gains.longer_sequences_tokens_per_s
        needed = record.point.bandwidth_bits_per_s / record.hfu_bound
        assert record.required_bits_per_s == pytest.approx(needed)
        assert 0 < record.best_mfu <= 1 + 1e-9


def test_the_vectors_that_were_worked_out_beforehand_are_its(study: Study) -> None:
    judged = judge(papers.load(), {study.matrix: study.rows})
    vectors = [of for of in judged if of.claim.where.endswith("test vectors")]
    assert len(vectors) == 6
    assert {of.verdict for of in vectors} == {None}  # a formula, with itself
    found = [finding for of in vectors for finding in of.findings]
    assert {(finding.agrees, finding.evidence) for finding in found} == {(True, "simulated")}


def test_the_committed_points_are_what_the_command_finds(
    study: Study, committed: list[runs.AnyRun]
) -> None:
    bound = next(run for run in committed if run.matrix == "bound")
    assert [row.settings for row in bound.rows] == [row.settings for row in study.rows]
    for ours, theirs in zip(study.rows, bound.rows, strict=True):
        assert ours.quantities == pytest.approx(dict(theirs.quantities))

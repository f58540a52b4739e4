"""A speed-up over few rounds, or whose interval straddles what is asked, decides nothing."""

from collections.abc import Sequence

import numpy as np
import pytest

from analysis.claims.computations import Sample
from analysis.claims.papers import Claims, Tolerance
from analysis.claims.verdicts import Judgement, cells, judge
from analysis.load.rows import Row, row
from experiments.records.comparison import FEWEST, Comparison
from tests.analysis.claims.made_up import FASTER, claim, content
from tests.experiments.stand_in import cell, record


def timed(strategy: str, seconds: Sequence[float]) -> Row:
    return row(record(cell(strategy=strategy, matrix="parity"), step_seconds=list(seconds)))


def rounds(median: float, noise: float, number: int = 2 * FEWEST) -> list[float]:
    return list(np.linspace(median - noise, median + noise, number))


def judged(ours: Sequence[float], theirs: Sequence[float], **tolerance: float) -> Judgement:
    check = {"matrix": "parity", "compute": FASTER, "tolerance": tolerance}
    claims = Claims.model_validate(content(claim(check)))
    (judgement,) = judge(claims, {"parity": [timed("fcdp", ours), timed("fsdp2", theirs)]})
    return judgement


def test_the_interval_is_that_of_the_comparison_of_both_cells() -> None:
    ours, theirs = timed("fcdp", rounds(1, 0.2)), timed("fsdp2", rounds(2, 0.4))
    timing = FASTER.timing([Sample(2.0, ours, theirs)])
    assert timing.interval == Comparison(ours.record, theirs.record).interval
    assert timing.rounds == 2 * FEWEST
    less = FASTER.model_copy(update={"kind": "reduction"}).timing([Sample(-1.0, ours, theirs)])
    assert less.interval == (1 - timing.interval[1], 1 - timing.interval[0])


def test_bytes_and_what_was_simulated_have_no_timing() -> None:
    ran = timed("fcdp", [1.0])
    simulated = row(ran.record.model_copy(update={"evidence": "simulated"}))
    by_bytes = FASTER.model_copy(update={"quantity": "inter_node_bytes"})
    assert by_bytes.timing([Sample(1.0, ran, ran)]) is None
    assert FASTER.timing([Sample(1.0, simulated, simulated)]) is None


def test_a_speed_up_over_few_rounds_decides_nothing() -> None:
    judgement = judged(rounds(1, 0.01, FEWEST - 1), rounds(2, 0.01), relative=0.15)
    assert judgement.verdict == "cannot be told here"
    (finding,) = judgement.findings
    assert finding.agrees is None
    assert any("fewer than 6 rounds" in note for note in finding.notes)


def test_an_interval_that_straddles_what_is_asked_decides_nothing() -> None:
    judgement = judged(rounds(1, 0.3), rounds(2.3, 0.6), relative=0.15)
    assert judgement.verdict == "cannot be told here"


@pytest.mark.parametrize(("theirs", "verdict"), [(2, "holds"), (4, "does not hold")])
def test_many_rounds_with_little_noise_decide(theirs: float, verdict: str) -> None:
    judgement = judged(rounds(1, 0.01), rounds(theirs, 0.01), relative=0.15)
    assert judgement.verdict == verdict
    (finding,) = judgement.findings
    assert finding.interval is not None
    assert "12 rounds: " in cells(finding, "×")


@pytest.mark.parametrize(
    ("tolerance", "interval", "decides"),
    [
        ({"relative": 0.1}, (1.9, 2.1), True),
        ({"relative": 0.1}, (1.0, 3.0), False),
        ({"relative": 0.1}, (2.1, 2.3), False),
        ({"relative": 0.1}, (2.3, 2.5), True),
        ({"at_least": 1}, (0.9, 1.1), False),
        ({"at_most": 1}, (0.8, 0.9), True),
    ],
)
def test_an_interval_decides_as_a_whole(
    tolerance: dict[str, float], interval: tuple[float, float], decides: bool
) -> None:
    assert Tolerance(**tolerance).decides(interval, 2.0) is decides

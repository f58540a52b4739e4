"""A speed-up over few steps, or whose interval straddles what is asked, decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from analysis.claims.computations import Ratio, Sample, Selection
from analysis.claims.papers import Claims, Tolerance
from analysis.claims.timing import STEPS, timing
from analysis.claims.verdicts import Finding, judge, summarise
from analysis.load.rows import Row

FASTER = Ratio(
    kind="ratio",
    quantity="tokens_per_s",
    of=Selection(strategy="fcdp"),
    over=Selection(strategy="fsdp2"),
)


def timed(strategy: str, seconds: Sequence[float]) -> Row:
    chosen = {"matrix": "parity", "strategy": strategy, "link": "unshaped", "model": "gpt2"}
    speed = {"tokens_per_s": 100 / float(np.median(seconds))}
    return Row(chosen, "ok", "emulated", speed, step_seconds=seconds)  # type: ignore[arg-type]


def steps(median: float, noise: float, number: int = 2 * STEPS) -> list[float]:
    return list(np.linspace(median - noise, median + noise, number))


def found(ours: Sequence[float], theirs: Sequence[float], **tolerance: float) -> Finding:
    claims = Claims.model_validate(
        {
            "papers": {"p": {"title": "P", "arxiv": "0000.00000"}},
            "matrices": {"parity": {}},
            "claims": [
                {
                    "id": "faster",
                    "paper": "p",
                    "where": "here",
                    "claim": "Is faster.",
                    "label": "text",
                    "number": 2,
                    "unit": "×",
                    "checks": [{"matrix": "parity", "compute": FASTER, "tolerance": tolerance}],
                }
            ],
        }
    )
    (finding,) = judge(claims, {"parity": [timed("fcdp", ours), timed("fsdp2", theirs)]})
    return finding


def test_the_interval_is_around_the_quotient_of_the_medians_and_the_same_each_time() -> None:
    sample = Sample(2.0, timed("fcdp", steps(1, 0.2)), timed("fsdp2", steps(2, 0.4)))

    one, again = (timing([sample], FASTER) for _ in range(2))

    assert one == again
    assert one is not None
    assert one.interval is not None
    low, high = one.interval
    assert 1.5 < low < 2 < high < 2.6
    assert (one.steps, one.enough) == (2 * STEPS, True)


def test_noisier_steps_have_a_wider_interval() -> None:
    widths = []
    for noise in (0.05, 0.3):
        sample = Sample(2.0, timed("fcdp", steps(1, noise)), timed("fsdp2", steps(2, noise)))
        of = timing([sample], FASTER)
        assert of is not None
        assert of.interval is not None
        widths.append(of.interval[1] - of.interval[0])

    assert widths[0] < widths[1] / 3


def test_bytes_and_what_was_simulated_have_no_timing() -> None:
    ran = timed("fcdp", [1.0])
    simulated = Row(ran.settings, "ok", "simulated", ran.quantities)
    by_bytes = FASTER.model_copy(update={"quantity": "inter_node_bytes"})

    assert timing([Sample(1.0, ran, ran)], by_bytes) is None
    assert timing([Sample(1.0, simulated, simulated)], FASTER) is None


def test_a_speed_up_over_few_steps_decides_nothing() -> None:
    finding = found(steps(1, 0.01, STEPS - 1), steps(2, 0.01), relative=0.15)

    assert finding.verdict == "undecided"
    assert any("fewer than 15 steps" in reason for reason in finding.reasons)
    assert summarise([finding]) == {"faster": "undecided"}


def test_an_interval_that_straddles_what_is_asked_decides_nothing() -> None:
    assert found(steps(1, 0.3), steps(2.3, 0.6), relative=0.15).verdict == "undecided"


@pytest.mark.parametrize(("theirs", "verdict"), [(2, "reproduced"), (4, "not reproduced")])
def test_many_steps_with_little_noise_decide(theirs: float, verdict: str) -> None:
    finding = found(steps(1, 0.01), steps(theirs, 0.01), relative=0.15)

    assert finding.verdict == verdict
    assert finding.interval is not None
    assert "95 % of draws" in finding.cells


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

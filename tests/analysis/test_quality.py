"""Time to quality: the best of a fair search, seconds to a loss, and the first strategy there."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.claims import papers
from analysis.quality import (
    SEARCH,
    TIMES,
    Trial,
    best,
    cases,
    joined,
    markdown,
    quality,
    subject,
    targets,
)
from experiments.matrix.reader import read
from experiments.records.cell import Cell, ClusterSpec
from experiments.records.record import Record
from experiments.records.record import read as load
from simulation.planner import quality as planned
from simulation.planner.plan import Plan, plan
from simulation.planner.quality import Quality
from simulation.planner.report import table
from tests.analysis import made_up
from tests.analysis.conftest import called, write_records
from tests.docs import ROOT
from tests.experiments.command_line import rendered
from tests.experiments.stand_in import record
from tests.simulation.planner.made_up import request

SLOW, FAST = 5_000_000, 1_000_000_000
#: Losses after 4, 8, … steps that each strategy comes to, at the better of two rates.
EXACT, APART = (4.0, 3.0, 2.5, 2.0), (4.2, 3.2, 2.7, 2.2)


def cell(matrix: str, strategy: str, link: int | None = None, **settings: Any) -> Cell:
    defaults: dict[str, Any] = {
        "matrix": matrix,
        "cluster": ClusterSpec(nodes=2, ranks_per_node=1),
        "dtype": "float32",
        "interval": 4,
        "held_out": 8,
    }
    return made_up.cell(strategy, link=link, **(defaults | settings))


def trial(strategy: str, rate: float, losses: tuple[float, ...], **settings: Any) -> list[Record]:
    """Two seeds, the second a little worse."""
    return [
        record(
            cell(SEARCH, strategy, learning_rate=rate, seed=seed, **settings),
            held_out_losses={4 * at: loss + 0.01 * seed for at, loss in enumerate(losses, 1)},
        )
        for seed in (0, 1)
    ]


def search() -> list[Record]:
    return [
        *trial("fcdp", 0.1, EXACT),
        *trial("fcdp", 0.2, (5.0, 5.0, 5.0, math.nan)),
        *trial("diloco", 0.1, (4.0, 4.0, 4.0, 4.0), outer_momentum=0.5),
        *trial("diloco", 0.1, APART, outer_momentum=0.9),
    ]


def times(slow: float = 8.0, fast: float = 1.0) -> list[Record]:
    """DiLoCo takes a second a step whatever the link, but for some wobble."""
    return [
        record(
            cell(TIMES, strategy, link),
            step_seconds=[seconds * (1 + 0.01 * (at % 3 - 1)) for at in range(32)],
            steps_per_round=4 if strategy == "diloco" else 1,
            inter_node_bytes_per_step=1e6,
        )
        for link, exact in ((FAST, fast), (SLOW, slow))
        for strategy, seconds in (("fcdp", exact), ("diloco", 1.0))
    ]


def test_the_best_trial_is_that_of_the_lowest_mean_and_no_number_is_the_worst() -> None:
    exact, apart = best(search())
    assert (exact.subject, exact.learning_rate, exact.momentum) == ("fcdp", 0.1, None)
    assert (apart.subject, apart.learning_rate, apart.momentum) == ("diloco τ = 4", 0.1, 0.9)
    assert apart.ends == [2.2, 2.21]


@pytest.mark.parametrize("lacks", [slice(2, None), slice(1, None), slice(None, -1)])
def test_a_search_that_gave_some_more_than_others_is_refused(lacks: slice) -> None:
    with pytest.raises(ValueError, match="must be as many for all"):
        best(search()[lacks])


def test_a_trial_without_losses_and_a_link_without_times_are_named() -> None:
    first, *others = search()
    with pytest.raises(ValueError, match=r"fcdp-.*has no held_out_losses \(ok\)"):
        best([record(first.cell), *others])
    with pytest.raises(ValueError, match="diloco τ = 4, 5 Mbit/s: is not among the times"):
        joined(search(), times()[:3])


@pytest.mark.parametrize(("loss", "steps"), [(4.5, 4), (4.0, 4), (3.5, 6), (2.0, 16), (1.9, None)])
def test_steps_to_a_loss_are_between_measurements(loss: float, steps: float | None) -> None:
    curve = {4 * at: value for at, value in enumerate(EXACT, 1)}
    reached = Trial("fcdp", "fcdp", 0.1, None, (curve,)).steps_to(loss)
    assert reached == (None if steps is None else [steps])


def sentences(timed: list[Record], loss: float) -> list[str]:
    return [case.clause(f"{loss:g}") for case in cases(joined(search(), timed), loss)]


def test_who_is_first_depends_on_the_link() -> None:
    """FCDP takes 7.98 steps, and DiLoCo 9.56, whose seconds do not depend on the link."""
    courses = joined(search(), times())
    assert targets(courses) == [3.01, 2.01]
    assert sentences(times(), 3.01) == [
        "DiLoCo τ = 4 comes to 3.01 6.7× sooner than FCDP; at the end it is 10.0 % above it",
        "FCDP is the first to come to 3.01, and exact",
    ]
    # DiLoCo never reaches the last loss of the exact strategy.
    assert sentences(times(), 2.01) == ["FCDP is the first to come to 2.01, and exact"] * 2
    # Strategies that do not differ beyond their seeds are alike.
    slow, _ = sentences(times(slow=1.2), 3.01)
    assert slow == "exact is as fast: FCDP and DiLoCo τ = 4 come to 3.01 alike"


def test_plans_say_of_each_link_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan quotes the case whose link takes as long beside computation, or a little less."""
    monkeypatch.setattr(planned, "RECORD", ROOT / "none.json")
    whole = request(gbit_s=1, strategies=("fcdp",), recomputed=(1.0,))
    made = plan(whole)
    assert "time to quality" not in printed(made)
    assert made.option.busy_seconds["inter_node"] > 0
    measured = quality(joined(search(), times()), times())
    monkeypatch.setattr(planned, "committed", lambda: measured)
    loss = "FCDP's loss at half of its steps"
    for case in measured.cases:
        for factor in (1.0, 1.5):
            seconds = {"compute": 2.0, "inter_node": 2.0 * factor * case.share}
            option = replace(made.option, busy_seconds=seconds)
            verdict = replace(made.verdicts[0], options=(option,))
            text = printed(replace(made, verdicts=(verdict,)))
            assert f"takes {case.share:.2g} times the computation" in text
            assert case.clause(loss) in text
    adapted = replace(made, request=request(gbit_s=1, strategies=("fcdp",), lora_rank=8))
    assert "time to quality" not in printed(adapted)


def printed(made: Plan) -> str:
    return " ".join(" ".join(rendered(table(made), 80)).split())


def test_one_command_writes_table_and_figure(tmp_path: Path) -> None:
    for name, records in ((SEARCH, search()), (TIMES, times())):
        (tmp_path / name).mkdir()
        write_records(records, tmp_path / name / "records.jsonl")
    output = called("time-to-quality", tmp_path).output
    assert markdown(joined(search(), times())) in output
    summary = (tmp_path / TIMES / "quality.json").read_text()
    assert Quality.model_validate_json(summary) == quality(joined(search(), times()), times())
    assert "held-out loss" in (tmp_path / TIMES / "quality.svg").read_text()
    (tmp_path / TIMES / "records.jsonl").unlink()
    assert "time-to-quality" in called("time-to-quality", tmp_path, status=2).output


def test_both_matrices_have_the_same_strategies_for_the_same_model() -> None:
    """Every strategy of the search has times, and as many trials as the others."""
    of = {name: read(name).running for name in (SEARCH, TIMES)}
    assert {subject(each) for each in of[SEARCH]} == {subject(each) for each in of[TIMES]}
    alike = ("model", "sequence_length", "micro_batch", "accumulation", "dtype")
    assert len({tuple(getattr(c, n) for n in alike) for cells in of.values() for c in cells}) == 1
    trials = Counter(subject(each) for each in of[SEARCH])
    assert set(trials.values()) == {7 * 3}


def test_claims_are_judged_by_the_best_trials() -> None:
    chosen = {
        (of.strategy, "v1" if "v1" in of.subject else "v2"): (of.learning_rate, of.momentum)
        for of in best(load(ROOT / "results" / SEARCH / "records.jsonl"))
    }
    checks = [each for claim in papers.load().claims for each in claim.checks]
    computed = [each.compute for each in checks if each.matrix == SEARCH]
    assert len(computed) == 3
    for ratio in computed:
        for side in (ratio.of, ratio.over):
            best_of = chosen[side.strategy or "", side.rule or "v2"]
            assert (side.learning_rate, side.outer_momentum) == best_of


def test_what_is_committed_is_what_the_records_give() -> None:
    search, timed = (load(ROOT / "results" / name / "records.jsonl") for name in (SEARCH, TIMES))
    assert planned.committed() == quality(joined(search, timed), timed)

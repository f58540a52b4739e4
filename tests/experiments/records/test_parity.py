"""Losses next to a reference's: what is the same, what is near enough, and what is a problem."""

import math
from typing import Any

import pytest

from experiments.records import parity
from experiments.records.cell import ClusterSpec
from experiments.records.parity import Parity, compare
from experiments.records.record import Record, State
from experiments.records.record import read as read_records
from tests.experiments.golden import tables
from tests.experiments.stand_in import cell, record
from tests.programs import RESULTS

#: One step of warm-up and three that are measured.
LOSSES = [5.6, 5.5, 5.4, 5.3]
#: How far the next number is that a loss can be in fp32, relative to it.
ROUNDED = 1e-7
DIFFERS = "learns something else, which step 4 shows first"
DIVERGED = "diverged: a loss is not finite"


def trained(
    strategy: str, losses: list[float] = LOSSES, state: State = "ok", **settings: Any
) -> Record:
    error = None if state == "ok" else "Traceback\nRuntimeError: the last line\n"
    return record(cell(strategy=strategy, **settings), state, error, losses=losses)


def compared(*others: Record) -> list[Parity]:
    """The others next to a reference that trained as it should."""
    first, *rest = compare([trained("fsdp2"), *others])
    assert first.problems == ()
    return rest


def off(share: float) -> list[float]:
    """Losses of which the last is too high by this share."""
    return [*LOSSES[:3], LOSSES[3] * (1 + share)]


@pytest.mark.parametrize(
    ("strategy", "losses", "problem"),
    [
        ("fcdp", LOSSES, None),
        ("fcdp", off(ROUNDED), None),
        ("fcdp", off(2e-6), DIFFERS),
        ("deepspeed-offload", off(2e-5), None),
        ("deepspeed-offload", off(1e-4), DIFFERS),
        ("qgz", off(0.01), None),
        ("qgz", off(0.03), DIFFERS),
        ("fcdp", [5.6, math.nan, math.nan, math.nan], DIVERGED),
        ("zero3", [math.nan] * 4, DIVERGED),
        ("zero3", [5.6, 5.5, math.inf, 5.3], DIVERGED),
        ("hpz", [5.6], "has 1 of 4 losses"),
        ("hpz", [], "has 0 of 4 losses"),
    ],
)
def test_a_cell_is_judged_by_its_losses(
    strategy: str, losses: list[float], problem: str | None
) -> None:
    (verdict,) = compared(trained(strategy, losses))
    assert verdict.problems == (() if problem is None else (problem,))


def test_a_cell_that_did_not_run_is_a_problem_and_a_skipped_one_is_not() -> None:
    (verdict,) = compared(trained("fcdp", state="failed"), trained("zero3", state="skipped"))
    assert verdict.problems == ("did not run (failed): RuntimeError: the last line",)


@pytest.mark.parametrize(
    "references",
    [
        [],
        [trained("fsdp2", state="failed")],
        [trained("fsdp2", [math.nan] * 4)],
        [trained("fsdp2", accumulation=4)],
    ],
    ids=["none", "failed", "diverged", "of other batches"],
)
def test_what_has_no_reference_was_not_compared(references: list[Record]) -> None:
    *_, verdict = compare([*references, trained("fcdp")])
    assert verdict.problems == ("was not compared: no fsdp2 trained with the same settings",)
    assert verdict.difference is None


def test_the_steps_that_both_have_trained_are_compared_with_the_longest_reference() -> None:
    (verdict,) = compared(trained("fcdp", LOSSES[:3], steps=2))
    assert verdict.problems == ()
    (verdict,) = compared(trained("fcdp", [*LOSSES[:2], 5.0], steps=2))
    assert verdict.problems == ("learns something else, which step 3 shows first",)
    short = trained("fsdp2", LOSSES[:2], steps=1, inter_bandwidth_bits_per_s=None)
    *_, verdict = compare([trained("fsdp2"), short, trained("fcdp", [5.6, 5.5, 5.0, 5.0])])
    assert verdict.problems == ("learns something else, which step 3 shows first",)


@pytest.mark.parametrize(("settings", "same"), tables(__file__))
def test_who_adds_in_the_same_order_is_the_same_bit_for_bit(
    settings: dict[str, Any], same: bool
) -> None:
    if "cluster" in settings:
        settings = settings | {"cluster": ClusterSpec(**settings["cluster"])}
    alike = ("tuning", "accumulation", "cluster")
    shared = {name: settings[name] for name in alike if name in settings}
    last = trained(losses=off(ROUNDED), **settings)
    *_, verdict = compare([trained("fsdp2", **shared), trained("zero3", **shared), last])
    expected = () if same else ("is not bit for bit zero3, which adds up in the same order",)
    assert verdict.problems == expected


def test_who_diverged_is_nobodys_equal() -> None:
    first, last = compared(trained("zero3", [math.nan] * 4), trained("fcdp"))
    assert first.problems == (DIVERGED,)
    assert last.problems == ()


def test_simulated_cells_have_no_losses_to_compare() -> None:
    simulated = trained("fcdp").model_copy(update={"evidence": "simulated"})
    with pytest.raises(ValueError, match="all records are simulated: nothing was trained"):
        compare([simulated])
    assert [of.record for of in compare([trained("fsdp2"), simulated])] == [trained("fsdp2")]


@pytest.mark.parametrize(
    "name", ["baselines", "parity", "quickstart", "reference", "unshaped", "volume"]
)
def test_the_committed_cells_learn_the_same(name: str) -> None:
    parities = compare(read_records(RESULTS / name / "records.jsonl"))
    assert len(parities) > 5
    assert {of.record.cell_id: of.problems for of in parities if of.problems} == {}


def test_most_of_our_engine_is_compared_bit_for_bit() -> None:
    read = read_records(RESULTS / "parity" / "records.jsonl")
    exact = {r.cell.strategy for r in read if parity._adds_in_one_order(r.cell)}
    assert exact == {"zero3", "hpz", "mics", "offload", "replicated", "fcdp", "fcdp-sched"}

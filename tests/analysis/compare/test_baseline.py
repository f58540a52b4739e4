"""Cells beside their baseline, and held-out metrics over seeds."""

import math

import pandas as pd
import pytest

from analysis.compare.baseline import compare, over_seeds, ratio, seeds_in_words
from analysis.report import run
from experiments.records.record import Record
from tests.analysis import made_up

SLOW = made_up.LINKS[0]


def row(compared: pd.DataFrame, strategy: str) -> pd.Series:
    rows = compared[compared["strategy"] == strategy]
    assert len(rows) == 1
    return rows.iloc[0]


def pair(**fcdp: object) -> list[Record]:
    """A baseline and FCDP under the same settings, FCDP's measurement changed."""
    baseline = made_up.record(made_up.cell("deepspeed-zero3", link=SLOW))
    return [baseline, made_up.record(made_up.cell("fcdp", link=SLOW), **fcdp)]


def test_losses_are_compared_at_steps_that_both_have() -> None:
    baseline, subject = pair(losses=[5.6, 5.5 - 0.2, 5.38 + 0.01])
    reference = baseline.measurement.losses
    found = row(compare([baseline, subject]), "fcdp")
    assert found["loss_difference"] == pytest.approx(5.39 - reference[2])
    assert found["loss_difference_max"] == pytest.approx(abs(5.3 - reference[1]))
    # One that diverged is no number and no error.
    diverged = row(compare(pair(losses=[math.nan] * 3)), "fcdp")
    assert math.isnan(diverged["loss_difference"])


def test_a_ratio_to_nothing_is_no_number() -> None:
    assert all(
        math.isnan(ratio(value, of)) for value in (None, 1.0) for of in (None, 0.0, math.nan)
    )


def test_evidence_of_other_kinds_is_not_compared() -> None:
    baseline, subject = pair()
    simulated = subject.model_copy(update={"evidence": "simulated"})
    assert row(compare([baseline, simulated]), "fcdp")["baseline"] == "fcdp"


def test_simulations_may_compare_each_at_its_own_micro_batch() -> None:
    named = (("deepspeed-zero3", 4), ("fcdp", 8))
    cells = [made_up.cell(name, micro_batch=size) for name, size in named]
    found = row(compare([made_up.record(c, evidence="simulated") for c in cells]), "fcdp")
    assert found["baseline"] == "deepspeed-zero3"
    sizes = {cell.strategy: made_up.record(cell).tokens_per_s for cell in cells}
    assert found["speed_up"] == pytest.approx(sizes["fcdp"] / sizes["deepspeed-zero3"])


#: Accuracy by strategy and seed: the differences are 0.02 and 0.04.
ACCURACIES = {"fsdp2": (0.90, 0.94), "fcdp": (0.92, 0.98)}


def of_accuracies(accuracies: dict[str, tuple[float, ...]]) -> pd.DataFrame:
    records = [
        made_up.record(
            made_up.cell(strategy, seed=seed), held_out_loss=1 - share, held_out_accuracy=share
        )
        for strategy, seeds in accuracies.items()
        for seed, share in enumerate(seeds)
    ]
    return compare(records, "fsdp2")


def test_the_table_of_seeds() -> None:
    shown = seeds_in_words(of_accuracies(ACCURACIES))
    rows = {row["Strategy"]: row for _, row in shown.iterrows()}
    assert rows["FCDP"]["held-out accuracy"] == "95.00 ± 4.24 %"
    assert rows["FCDP"]["accuracy difference"] == "+3.00 ± 1.41 points"
    assert rows["FCDP"]["loss difference"] == "-0.0300 ± 0.0141"
    assert rows["FSDP2"]["accuracy difference"] == "–"
    assert run.OVER_SEEDS in run.markdown(of_accuracies(ACCURACIES))
    page = run.render(of_accuracies(ACCURACIES), [], {})
    assert run.OVER_SEEDS in page
    assert "+3.00 ± 1.41 points" in page


def test_one_seed_has_no_spread() -> None:
    once = of_accuracies({name: seeds[:1] for name, seeds in ACCURACIES.items()})
    assert over_seeds(once).empty
    assert run.OVER_SEEDS not in run.markdown(once)
    # Nor has its difference, of one beside several.
    uneven = ACCURACIES | {"fsdp2": ACCURACIES["fsdp2"][:1]}
    shown = seeds_in_words(of_accuracies(uneven))
    (row,) = (row for _, row in shown.iterrows() if row["Strategy"] == "FCDP")
    assert row["accuracy difference"] == "+2.00 points"

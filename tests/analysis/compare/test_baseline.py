import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    fcdp = row(compare([baseline, subject]), "fcdp")
    assert fcdp["loss_difference"] == pytest.approx(5.39 - reference[2])
    assert fcdp["loss_difference_max"] == pytest.approx(abs(5.3 - reference[1]))
    # One that diverged is no number and no error.
    diverged = row(compare(pair(losses=[math.nan] * 3)), "fcdp")
    assert math.isnan(diverged["loss_difference"])


@given(st.floats(allow_nan=True), st.sampled_from([0.0, math.nan]))
def test_a_ratio_to_nothing_is_no_number(value: float, reference: float) -> None:
    assert math.isnan(ratio(value, reference))


def test_the_fastest_other_strategy_is_named(compared: pd.DataFrame) -> None:
    group = compared.query(
        f"model == 'gpt2-4x128' and tuning == 'full' and inter_bandwidth_bits_per_s == {SLOW}"
    )
    seconds = group.set_index("strategy")["step_seconds_median"]
    fcdp = row(group, "fcdp")
    assert fcdp["fastest_other"] == "fsdp2"
    assert fcdp["speed_up_over_fastest_other"] == seconds["fsdp2"] / seconds["fcdp"]
    assert row(group, "fsdp2")["fastest_other"] == "fcdp"


def test_without_the_baseline_the_first_strategy_that_finished_stands_in(
    compared: pd.DataFrame,
) -> None:
    lora = compared.query("model == 'llama-4x128' and tuning == 'lora'")
    group = lora[lora["inter_bandwidth_bits_per_s"].isna()]
    assert set(group["baseline"]) == {"fsdp2"}


def test_evidence_of_other_kinds_is_not_compared() -> None:
    baseline, subject = pair()
    simulated = subject.model_copy(update={"evidence": "simulated"})
    assert row(compare([baseline, simulated]), "fcdp")["baseline"] == "fcdp"


#: Accuracy by strategy and seed: the differences are 0.02 and 0.04.
ACCURACIES = {"fsdp2": (0.90, 0.94), "fcdp": (0.92, 0.98)}


def over(accuracies: dict[str, tuple[float, ...]]) -> pd.DataFrame:
    records = [
        made_up.record(
            made_up.cell(strategy, seed=seed), held_out_loss=1 - share, held_out_accuracy=share
        )
        for strategy, seeds in accuracies.items()
        for seed, share in enumerate(seeds)
    ]
    return compare(records, "fsdp2")


def test_a_page_has_the_table_and_a_single_seed_has_no_spread() -> None:
    page = run.render(over(ACCURACIES), [], {})
    assert run.OVER_SEEDS in page
    assert "+3.00 ± 1.41 points" in page
    once = over({name: seeds[:1] for name, seeds in ACCURACIES.items()})
    assert over_seeds(once).empty
    # Nor has the difference of a strategy with one seed from one with several.
    shown = seeds_in_words(over({"fsdp2": ACCURACIES["fsdp2"][:1], "fcdp": ACCURACIES["fcdp"]}))
    (fcdp,) = (cells for _, cells in shown.iterrows() if cells["Strategy"] == "FCDP")
    assert fcdp["accuracy difference"] == "+2.00 points"

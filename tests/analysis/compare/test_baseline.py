import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare.baseline import compare, ratio
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


def test_another_baseline_can_be_asked_for(records: list[Record]) -> None:
    asked = compare(records, "fsdp2")
    failed = (asked["model"] == "llama-4x128") & (asked["tuning"] == "full")
    failed &= asked["inter_bandwidth_bits_per_s"] == SLOW
    assert set(asked.loc[~failed, "baseline"]) == {"fsdp2"}
    assert set(asked.loc[failed, "baseline"]) == {"deepspeed-zero3"}


def test_evidence_of_other_kinds_is_not_compared() -> None:
    baseline, subject = pair()
    simulated = subject.model_copy(update={"evidence": "simulated"})
    assert row(compare([baseline, simulated]), "fcdp")["baseline"] == "fcdp"

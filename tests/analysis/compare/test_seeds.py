"""Held-out metrics over seeds: means, and differences of cells with the same seed."""

import pandas as pd

from analysis.compare.baseline import compare, over_seeds, seeds_in_words
from analysis.report import run
from tests.analysis import made_up

#: Accuracy by strategy and seed: the differences are 0.02 and 0.04.
ACCURACIES = {"fsdp2": (0.90, 0.94), "fcdp": (0.92, 0.98)}


def compared(accuracies: dict[str, tuple[float, ...]]) -> pd.DataFrame:
    records = [
        made_up.record(
            made_up.cell(strategy, seed=seed), held_out_loss=1 - share, held_out_accuracy=share
        )
        for strategy, seeds in accuracies.items()
        for seed, share in enumerate(seeds)
    ]
    return compare(records, "fsdp2")


def test_a_page_has_the_table_and_a_single_seed_has_no_spread() -> None:
    page = run.render(compared(ACCURACIES), [], {})
    assert run.OVER_SEEDS in page
    assert "+3.00 ± 1.41 points" in page
    once = compared({name: seeds[:1] for name, seeds in ACCURACIES.items()})
    assert over_seeds(once).empty
    # Nor has the difference of a strategy with one seed from one with several.
    shown = seeds_in_words(compared({"fsdp2": ACCURACIES["fsdp2"][:1], "fcdp": ACCURACIES["fcdp"]}))
    (row,) = (row for _, row in shown.iterrows() if row["Strategy"] == "FCDP")
    assert row["accuracy difference"] == "+2.00 points"

"""A claim's number is computed from the cells that it names, each with its own partner."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from analysis.claims.computations import LossDifference, Sample
from analysis.load.rows import Row, row
from experiments.records.comparison import FEWEST, Comparison
from experiments.records.record import Record
from tests.analysis import made_up
from tests.analysis.claims.made_up import FASTER, FCDP, FSDP2


def recorded(strategy: str, **changes: Any) -> Record:
    return made_up.record(made_up.cell(strategy, link=made_up.LINKS[0], **changes))


def made(strategy: str, **changes: Any) -> Row:
    return row(recorded(strategy, **changes))


def test_cells_of_other_settings_or_evidence_are_no_partners() -> None:
    simulated = replace(made("fsdp2"), evidence="simulated")
    for other in (made("fsdp2", accumulation=4), simulated):
        assert FASTER.samples([made("fcdp"), other]) == []
    # FSDP2 has no policy: it is compared with FCDP's default.
    assert FASTER.samples([made("fcdp", policy="device"), made("fsdp2")]) == []
    # How long a cell was run says nothing of what it is.
    assert len(FASTER.samples([made("fcdp"), made("fsdp2", steps=1, warmup_steps=1)])) == 1


def test_a_row_has_the_quantities_of_its_record() -> None:
    record = recorded("fcdp")
    sent = record.measurement.inter_node_bytes_per_step
    assert row(record).quantities == pytest.approx(
        {
            "tokens_per_s": record.tokens_per_s,
            "tokens_per_s_per_gpu": (record.tokens_per_s or 0) / 4,
            "inter_node_bytes": sent,
            "all_nodes_bytes": 2 * sent,
            "inter_node_bytes_over_least": 1 / 0.99,
            "gather_bytes": 0.45 * sent,
            "backward_gather_bytes": 0,
            "all_nodes_forward_bytes": 2 * 0.45 * sent,
            "all_nodes_backward_bytes": 2 * 0.54 * sent,
            # Two ranks a node, each with the cache; the model in bfloat16.
            "host_cache_share": 2 * 3.4e6 / (2 * 1.7e6),
        }
    )


@pytest.mark.parametrize("losses", [[5.6, *[math.nan] * 9], [5.6], []])
def test_a_loss_that_is_missing_or_not_finite_is_infinitely_far(losses: list[float]) -> None:
    difference = LossDifference(kind="loss_difference", of=FCDP, over=FSDP2)
    ours = row(made_up.altered(recorded("fcdp"), losses=losses))
    (sample,) = difference.samples([ours, made("fsdp2")])
    assert sample.value == math.inf


def timed(strategy: str, median: float, noise: float) -> Row:
    seconds = [*np.linspace(median - noise, median + noise, 2 * FEWEST)]
    return row(made_up.altered(recorded(strategy), step_seconds=seconds))


def test_the_interval_is_that_of_the_comparison_of_both_cells() -> None:
    ours, theirs = timed("fcdp", 1, 0.2), timed("fsdp2", 2, 0.4)
    found = FASTER.timing([Sample(2.0, ours, theirs)])
    assert found.interval == Comparison(ours.record, theirs.record).interval
    assert (found.rounds, found.enough) == (2 * FEWEST, True)
    less = FASTER.model_copy(update={"kind": "reduction"}).timing([Sample(-1.0, ours, theirs)])
    assert less.interval == (1 - found.interval[1], 1 - found.interval[0])


def test_bytes_and_what_was_simulated_have_no_timing() -> None:
    ran = made("fcdp")
    simulated = row(ran.record.model_copy(update={"evidence": "simulated"}))
    by_bytes = FASTER.model_copy(update={"quantity": "inter_node_bytes"})
    assert by_bytes.timing([Sample(1.0, ran, ran)]) is None
    assert FASTER.timing([Sample(1.0, simulated, simulated)]) is None

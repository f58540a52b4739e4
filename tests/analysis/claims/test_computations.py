"""A claim's number is computed from the cells that it names, each with its own partner."""

import math
from dataclasses import replace
from typing import Any

import pytest

from analysis.claims.computations import LossDifference
from analysis.load.rows import Row, row
from experiments.records.record import Record
from tests.analysis import made_up
from tests.analysis.claims.made_up import FASTER, FCDP, FSDP2

GAIN = FASTER.model_copy(update={"kind": "gain"})


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
    # The number of steps that a cell was run for does not part it from others.
    assert len(FASTER.samples([made("fcdp"), made("fsdp2", steps=1, warmup_steps=1)])) == 1


@pytest.mark.parametrize("losses", [[5.6, *[math.nan] * 9], [5.6], []])
def test_a_loss_that_is_missing_or_not_finite_is_infinitely_far(losses: list[float]) -> None:
    difference = LossDifference(kind="loss_difference", of=FCDP, over=FSDP2)
    ours = row(made_up.altered(recorded("fcdp"), losses=losses))
    (sample,) = difference.samples([ours, made("fsdp2")])
    assert sample.value == math.inf


def without_figures(of: Row, state: Any = "oom") -> Row:
    return replace(of, state=state, quantities={})


def test_ours_without_figures_is_as_bad_as_can_be() -> None:
    rows = [made("fsdp2"), without_figures(made("fcdp"))]
    memory = FASTER.model_copy(update={"quantity": "inter_node_bytes"})
    assert [sample.value for sample in GAIN.samples(rows)] == [-1.0]
    assert [sample.value for sample in memory.samples(rows)] == [math.inf]
    assert GAIN.lacking(rows) == [rows[1]]


def test_a_comparator_without_figures_is_named_and_cells_left_out_have_no_part() -> None:
    rows = [without_figures(made("fsdp2"), "failed"), made("fcdp")]
    assert (GAIN.samples(rows), GAIN.lacking(rows)) == ([], [rows[0]])
    rows = [made("fsdp2"), without_figures(made("fcdp"), "skipped")]
    assert (GAIN.samples(rows), GAIN.lacking(rows)) == ([], [])

"""Figures of docs/when-not.md are those of the committed records; what it warns of is so."""

from __future__ import annotations

import pytest

from analysis import text
from analysis.load.table import load
from experiments.records.record import Record
from simulation.quantities import format_link
from tests.docs import ROOT, table


def find(row: dict[str, str], strategy: str) -> Record:
    """The record of one row's setting, by one strategy."""
    setting = [row[name] for name in ("Model", "Tuning", "Link", "Micro-batches")]
    (record,) = (
        record
        for record in load(ROOT / "results" / row["Records"] / "records.jsonl")
        if record.state == "ok"
        and record.cell.strategy == strategy
        and [
            record.cell.model.name,
            record.cell.tuning,
            format_link(record.cell.inter_bandwidth_bits_per_s),
            str(record.cell.accumulation),
        ]
        == setting
    )
    return record


@pytest.mark.parametrize(
    "row", table("when-not.md", "figures"), ids=lambda row: "-".join(row.values())
)
def test_figures_are_those_of_the_records(row: dict[str, str]) -> None:
    fsdp2, ours = (find(row, strategy) for strategy in ("fsdp2", "fcdp"))
    theirs_s, ours_s = fsdp2.step_seconds_median, ours.step_seconds_median
    assert theirs_s is not None
    assert ours_s is not None
    assert fsdp2.measurement is not None
    assert ours.measurement is not None
    least = fsdp2.measurement.inter_node_bytes_closed_form
    assert least is not None
    assert row == {
        **{name: row[name] for name in ("Records", "Model", "Tuning", "Link", "Micro-batches")},
        "FSDP2 s/step": text.number(theirs_s),
        "FCDP s/step": text.number(ours_s),
        "over FSDP2": text.times(theirs_s / ours_s),
        "ZeRO-3 minimum MB/step": text.number(least / 1e6),
        "FCDP MB/step": text.number(ours.measurement.inter_node_bytes_per_step / 1e6),
    }

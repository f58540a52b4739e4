"""Figures of docs/when-not.md are those of the committed records; what it warns of is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fcdp
from analysis import text
from analysis.frame import load
from experiments.matrix import format_bandwidth
from experiments.records import Record
from tests.docs import ROOT, table
from tests.fcdp.training import topology_of
from tests.ranks import Pools


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
            format_bandwidth(record.cell.inter_bandwidth_bits_per_s),
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


class Skipping(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != self.skipped:
                x = block(x)
        return x


def error_after_a_skipped_block(remedy: bool) -> float:
    """Of a forward after: a no_grad forward that skips a block, then an optimizer step."""
    torch.manual_seed(0)
    model: Any = Skipping()
    fcdp.shard(model, topology_of(2, 1), units=model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 4)
    model(x).sum().backward()
    model.skipped = 1
    with torch.no_grad():
        model(x)
    model.skipped = None
    if remedy:
        model.blocks[1].unshard()
        model.blocks[1].reshard()
    optimizer.step()
    optimizer.zero_grad()
    got, expected = model(x), x
    for block in model.blocks:
        weight, bias = block.weight.full_tensor(), block.bias.full_tensor()
        expected = torch.nn.functional.linear(expected, weight, bias)
    return float((got - expected).abs().max())


def test_the_remedy_after_a_skipped_block(ranks: Pools) -> None:
    assert max(ranks.run(2, error_after_a_skipped_block, True)) == 0


def test_a_skipped_block_needs_the_remedy(ranks: Pools) -> None:
    """If this fails, the library has learnt to do without: take the warning out of the page."""
    assert min(ranks.run(2, error_after_a_skipped_block, False)) > 0.01

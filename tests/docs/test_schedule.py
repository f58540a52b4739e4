"""The drawn schedule is the library's: order of calls, counts, and the committed figures."""

from dataclasses import replace
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

import fcdp
from docs import draw_schedule
from docs.draw_schedule import Kind, Timeline
from tests.docs import table
from tests.fcdp.training import Run, Settings
from tests.ranks import Pools

#: The ranges that the library marks in a profile.
RANGES = {
    Kind.GATHER_INTER: "gather_inter",
    Kind.GATHER_INTRA: "gather_intra",
    Kind.STORE: "cache_store",
    Kind.LOAD: "cache_load",
    Kind.REDUCE_INTRA: "reduce_intra",
    Kind.REDUCE_INTER: "reduce_inter",
}

#: The thread waits for a reduction in flight, which the figure does not show.
WAIT = "fcdp::reduce_wait"


def ranges_of_a_step() -> list[str]:
    """Ranges of a rank's second step of full fine-tuning, in the order of their starts."""
    run = Run(Settings())
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            run.step()
    events = sorted(prof.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("fcdp::")]


def test_a_step_on_cpus_has_the_order_that_is_drawn(ranks: Pools) -> None:
    drawn = draw_schedule.Cpu(draw_schedule.blocks(2), draw_schedule.Unit("R")).step()
    names = {"R": "root", "1": "blocks.0", "2": "blocks.1"}
    expected = [
        f"fcdp::{RANGES[bar.kind]} {names[bar.unit]}" for bar in drawn.bars if bar.kind in RANGES
    ]
    assert len(expected) == 18
    for ranges in ranks.run(4, ranges_of_a_step):
        waits = [name for name in ranges if name.startswith(WAIT)]
        assert [name for name in ranges if name not in waits] == expected
        # Of the three reductions the first is waited for when the last is about to begin.
        assert waits == [f"{WAIT} {unit}" for unit in ("blocks.1", "blocks.0", "root")]
        assert ranges[-5:] == ["fcdp::reduce_intra root", waits[0], ranges[-3], *waits[1:]]


@pytest.mark.parametrize(("name", "line"), draw_schedule.schedules().items())
def test_no_stream_does_two_things_at_once(name: str, line: Timeline) -> None:
    for lane in line.lanes:
        bars = [bar for bar in line.bars if bar.lane == lane]
        starts, ends = [bar.start for bar in bars], [bar.end for bar in bars]
        assert bars
        assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))


def counts(settings: Settings, skipped: int) -> dict[str, int]:
    """Gathers and reductions of one micro-batch, after ``skipped`` others."""
    run = Run(settings)
    ledger = fcdp.ledger(run.model)
    for index in range(settings.accumulation * 2):
        if index == skipped:
            ledger.reset()
        elif index > skipped:
            break
        last = (index + 1) % settings.accumulation == 0
        with fcdp.accumulate(run.model, last=last):
            run.loss().backward()
        if last:
            run.optimizer.step()
            run.optimizer.zero_grad()
    reduced = ledger.bytes["inter_node"]["reduce"] > 0
    return {"misses": ledger.misses, "hits": ledger.hits, "reduced across nodes": reduced}


FULL = Settings(accumulation=3)
#: Adapters of rank 1 share one unit, which stays gathered.
LORA = replace(FULL, adapter_rank=1)
#: Row of the table → run, and the micro-batch of the second step that is looked at.
ROWS: dict[str, tuple[Settings, int]] = {
    "full, first": (FULL, 3),
    "full, middle": (FULL, 4),
    "full, last": (FULL, 5),
    "full, first, checkpointed": (replace(FULL, checkpointing=True), 3),
    "LoRA, first": (LORA, 3),
    "LoRA, middle": (LORA, 4),
    "LoRA, last": (LORA, 5),
}


def test_every_row_of_the_table_of_counts_is_run() -> None:
    assert [row["micro-batch of a step"] for row in table("how-it-works.md", "counts")] == [*ROWS]


@pytest.mark.parametrize(
    "row", table("how-it-works.md", "counts"), ids=lambda row: next(iter(row.values()))
)
def test_counts_of_the_table(ranks: Pools, row: dict[str, str]) -> None:
    settings, micro_batch = ROWS[row["micro-batch of a step"]]
    expected: dict[str, Any] = {name: int(row[name]) for name in ("misses", "hits")}
    expected["reduced across nodes"] = row["reduced across nodes"] == "yes"
    assert ranks.run(4, counts, settings, micro_batch)[0] == expected

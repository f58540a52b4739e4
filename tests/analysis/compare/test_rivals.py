"""Rivals of FCDP: who is one, who is faster, and the sentence that says so."""

from typing import Any

from analysis.compare import rivals
from experiments.records.record import Record
from tests.experiments.stand_in import cell, record


def ran(strategy: str, seconds: float, rounds: int = 8, **settings: Any) -> Record:
    steps = [seconds * (1 + 0.0005 * step) for step in range(rounds)]
    return record(cell(strategy=strategy, **settings), step_seconds=steps)


def test_rivals_are_exact_and_not_fcdp_itself() -> None:
    group = [
        ran("fcdp", 1.0),
        ran("zeropp", 0.1),
        ran("fcdp", 0.2, gather_codec="delta"),
        ran("fcdp-sched", 0.3),
        ran("zero3", 0.4, gather_codec="int8"),
        ran("co2", 0.5),
        record(cell(strategy="ddp"), "failed"),
        ran("fsdp2", 3.0),
        ran("fsdp2-hsdp", 2.0),
    ]
    assert [each.cell.strategy for each in rivals.ran(group)] == ["fsdp2-hsdp", "fsdp2"]


def test_faster_is_beyond_the_interval_of_enough_rounds() -> None:
    ours, near, few = ran("fcdp", 1.0), ran("fsdp2", 0.999), ran("ddp", 0.5, rounds=5)
    hsdp, zero3 = ran("fsdp2-hsdp", 0.5), ran("zero3", 2.0)
    group = [ours, near, few, hsdp, zero3]
    assert [pair.of for pair in rivals.faster(group)] == [hsdp]
    assert rivals.faster([near, hsdp]) == []
    words = rivals.in_words([ran("fcdp", 1.0), ran("fsdp2", 2.0)])
    assert words.endswith("none. Not faster: FSDP2.")
    assert rivals.in_words([]) == ""

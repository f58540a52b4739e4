"""Tables say what the records say."""

from typing import Any

from simulation import models
from simulation.imitated import study
from simulation.imitated.records import MemoryRecord
from tests.simulation.imitated.small import case, settled


def record(strategy: str, largest: int | None, **settings: Any) -> MemoryRecord:
    usual = {"model": models.find("gpt-30b"), "sequence_length": 512}
    return settled(case(strategy, **(usual | settings)), largest)


def test_each_length_has_a_table_of_the_largest_batch_the_papers_peak_and_the_host() -> None:
    tables = study.tables(
        [
            record("fcdp", 1, sequence_length=2048),
            record("fcdp", 5),
            record("fcdp", 7, tuning="lora"),
            record("ddp", None),
        ]
    )
    assert [*tables] == ["gpt-30b, 512 tokens per sequence", "gpt-30b, 2,048 tokens per sequence"]
    assert tables["gpt-30b, 512 tokens per sequence"] == [
        ("fcdp host", "5 (50.0 GB)", "", "7 (50.0 GB)", "", "16.0"),
        ("ddp", "skipped", "", "", "", "–"),
    ]

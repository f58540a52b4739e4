"""The study of memory as a run; its records are made up."""

from analysis.load.runs import of_memory
from tests.simulation.imitated.small import case, settled


def test_of_a_case_that_was_settled_again_the_last_record_counts() -> None:
    first = settled(case("fcdp"), 8)
    later = first.model_copy(update={"started_at": "2026-01-03T00:00:00+00:00"})
    assert of_memory("memory.jsonl", [later, first]).records == [later]

"""The study of memory as rows, as a run and as a figure; its records are made up."""

from itertools import product

from matplotlib.text import Annotation

from analysis.load.runs import Study, of_memory
from analysis.paper import figures
from simulation.imitated.records import MemoryRecord
from simulation.transformer import ModelSpec
from tests.simulation.imitated.small import case, settled

MODELS = [
    ModelSpec(name=f"gpt-{size}b", family="gpt2", layers=48, width=64 * size, heads=size)
    for size in (10, 30)
]


def made(strategy: str, model: ModelSpec, tuning: str, again: bool, largest: int) -> MemoryRecord:
    sizes = {"sequence_length": 512, "lora_rank": 8, "device_bytes": 48 * 10**9}
    of = case(strategy, model=model, tuning=tuning, checkpointing=again, **sizes)
    cached = 15 * 10**9 if strategy == "fcdp" else None
    ran = None if strategy == "ddp" else largest
    return settled(of, ran, host_cache_bytes_per_node=cached)


#: Of each strategy: gpt-10b and gpt-30b.
LARGEST = {"fcdp": (20, 7), "zero3": (20, 8), "zeropp": (16, 0), "ddp": (0, 0)}


def study() -> Study:
    """Each strategy with each model and way of tuning, with and without checkpointing."""
    records = [
        made(name, model, tuning, again, LARGEST[name][at] * (1 + again))
        for name in LARGEST
        for at, model in enumerate(MODELS)
        for tuning, again in product(("full", "lora"), (False, True))
    ]
    return of_memory("memory/memory.jsonl", records)


def test_of_a_case_that_was_settled_again_the_last_record_counts() -> None:
    first = study().records[0]
    later = first.model_copy(update={"started_at": "2026-01-03T00:00:00+00:00"})
    assert of_memory("memory.jsonl", [later, first]).records == [later]


def test_values_drawn_are_the_records() -> None:
    memory = study()
    figure = figures.memory_study(memory.records, memory.summary).figure
    assert len(figure.axes) == 2 * 4
    first, again, *_ = figure.axes[4:]
    assert first.get_title() == "gpt-30b, 512 tokens\nfull fine-tuning"
    assert again.get_title() == "gpt-30b, 512 tokens\nfull fine-tuning, checkpointing"
    said = [item.get_text() for item in first.texts if isinstance(item, Annotation)]
    assert said == ["skipped", "8", "0", "7"]
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "ddp",
        "zero3",
        "zeropp",
        "fcdp host",
    ]

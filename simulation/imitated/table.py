"""The records as tables, for the terminal and as Markdown; and next to the paper's statements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from simulation.imitated.records import Case, MemoryRecord
from simulation.imitated.study import PAPER_MICRO_BATCH
from simulation.models import SEQUENCE_LENGTH

_HEAD = ("strategy", "full", "full, checkpointing", "LoRA", "LoRA, checkpointing", "host GB a node")
_KINDS = (("full", False), ("full", True), ("lora", False), ("lora", True))


@dataclass(frozen=True)
class Table:
    """A table of one model, or of the paper's statements."""

    title: str
    rows: Sequence[tuple[str, ...]]
    head: tuple[str, ...] = _HEAD


def tables(records: Iterable[MemoryRecord]) -> list[Table]:
    """One table per length and model, one row per strategy: the largest micro-batch, and a peak."""
    groups: dict[tuple[int, str], list[MemoryRecord]] = {}
    for record in records:
        case = record.case
        groups.setdefault((case.sequence_length, case.model.name), []).append(record)
    return [
        Table(f"{name}, {length:,} tokens per sequence", _rows(groups[length, name]))
        for length, name in sorted(groups)
    ]


def _rows(records: Sequence[MemoryRecord]) -> list[tuple[str, ...]]:
    by_label: dict[str, dict[tuple[str, bool], MemoryRecord]] = {}
    for record in records:
        kinds = by_label.setdefault(record.case.label, {})
        kinds[record.case.tuning, record.case.checkpointing] = record
    return [
        (label, *(_figure(kinds.get(kind)) for kind in _KINDS), _host(kinds.values()))
        for label, kinds in by_label.items()
    ]


def _figure(record: MemoryRecord | None) -> str:
    if record is None:
        return ""
    if record.finding is None:
        return record.state
    at_paper = next(
        peak.device_bytes for peak in record.finding.peaks if peak.micro_batch == PAPER_MICRO_BATCH
    )
    return f"{record.finding.largest_micro_batch} ({at_paper / 1e9:.1f} GB)"


def _host(records: Iterable[MemoryRecord]) -> str:
    """Host memory of a node in GB, the most over what is tuned and how; a dash without."""
    sizes = [
        record.case.ranks_per_node * peak.host_bytes
        for record in records
        if record.finding is not None
        for peak in record.finding.peaks
    ]
    return f"{max(sizes) / 1e9:.1f}" if sizes else "–"


def markdown(records: Sequence[MemoryRecord]) -> str:
    """The text of ``memory.md``: what was asked, the tables, the paper's statements."""
    case = records[0].case
    parts = [
        "# Device memory at paper scale",
        _explain(case),
        *(f"## {table.title}\n\n{_as_markdown(table)}" for table in tables(records)),
        "## What the paper says\n\n" + _as_markdown(statements(records)),
        _unfinished(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _explain(case: Case) -> str:
    return (
        f"One of {case.nodes} × {case.ranks_per_node} ranks with {case.device_bytes / 1e9:.0f} GB "
        f"each, of which {case.reserve_bytes / 1e9:.0f} GB are left to the driver, NCCL and "
        f"fragmentation (our choice). bf16, parameters "
        f"and optimizer states in fp32, also frozen ones; LoRA of rank {case.lora_rank} on Q, K, V "
        "and O; AdamW as the matrices have it (foreach), which needs room for copies of what it "
        "steps. The first figure is the largest micro-batch that fits: it was run, and the next "
        f"one too, which does not fit. In brackets the peak of a step at micro-batch "
        f"{PAPER_MICRO_BATCH}. GB are 10⁹ bytes.\n\n"
        "Evidence: simulated. Forward, backward and optimizer step are the real code of PyTorch, "
        "of the strategy and of `transformers`, on all layers; tensors have shapes but no "
        "contents, collectives send nothing, and the device is one that PyTorch is told of. Not "
        "counted: fragmentation, memory that a stream still holds when the program has let go of "
        "it, and what libraries take for themselves."
    )


def statements(records: Sequence[MemoryRecord]) -> Table:
    """The paper's statements about memory, and what the same code says of them here."""
    largest = {
        (r.case.label, _where(r.case)): r.finding.largest_micro_batch
        for r in records
        if r.finding is not None
    }

    def compare(label: str, other: str, holds: Callable[[int, int], bool]) -> str:
        answers = [
            holds(size, largest[other, on])
            for (name, on), size in largest.items()
            if name == label and (other, on) in largest
        ]
        return f"in {sum(answers)} of {len(answers)} cases" if answers else "not run"

    def runs_out(label: str, model: str) -> str:
        sizes = [
            f"{largest[label, where]} {'with' if where[3] else 'without'} checkpointing"
            for where in product((SEQUENCE_LENGTH,), (model,), ("full",), (False, True))
            if (label, where) in largest
        ]
        return "largest micro-batch " + ", ".join(sizes) if sizes else "not run"

    rows = [
        ("ZeRO++ runs out of memory at 30B", runs_out("zeropp", "gpt-30b")),
        ("MiCS runs out of memory on large models", runs_out("fsdp2-hsdp", "gpt-30b")),
        (
            "FCDP trains at ZeRO-3's largest batch (host cache)",
            compare("fcdp host", "zero3", operator.eq),
        ),
        (
            "the same, against PyTorch's FSDP2",
            compare("fcdp host", "fsdp2", operator.eq),
        ),
        (
            "ZeRO++ must use smaller batches than ZeRO-3",
            compare("zeropp", "zero3", operator.lt),
        ),
    ]
    return Table("statements", rows, ("the paper says", "here"))


def _where(case: Case) -> tuple[int, str, str, bool]:
    return case.sequence_length, case.model.name, case.tuning, case.checkpointing


def _unfinished(records: Sequence[MemoryRecord]) -> str:
    reasons = {f"- `{r.case.label}`: {r.error}" for r in records if r.error}
    return "## Not run\n\n" + "\n".join(sorted(reasons)) if reasons else ""


def _as_markdown(table: Table) -> str:
    lines = [table.head, tuple("---" for _ in table.head), *table.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

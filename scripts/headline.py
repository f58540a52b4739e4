"""Tables of FCDP beside its rivals, as Markdown: README's, and what each part of FCDP gives."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from analysis import strategies, text
from analysis.compare import rivals
from experiments.records.comparison import Comparison
from experiments.records.modelled import measured_mfu
from experiments.records.record import Record
from scripts.tables import by_subject, crossed, link, noted, step

#: A comparison's cells that ran, by what is compared.
_Group = Mapping[str, Record]
#: Subjects that FCDP's speed is divided by, of each row the fastest that ran.
_OVER = {
    "over `fsdp2-hsdp`": ("fsdp2-hsdp",),
    "over `zero3`": ("zero3",),
    "over ZeRO-3 as shipped, the faster": ("deepspeed-zero3", "fsdp2"),
}
#: FCDP's parts, each added to those above it, by the subject that has them all.
_PARTS = {
    "fcdp none flat exchanges": "ZeRO-3, one ring over all ranks",
    "fcdp none undeferred exchanges": "+ exchanges inside of nodes and across apart",
    "fcdp-sched undeferred exchanges": "+ one gather per step",
    "fcdp-sched": "+ one reduction per step",
    "fcdp": "+ frozen parameters gathered once",
    "fcdp gather delta reduce exact": "+ differences",
}


def result(records: Sequence[Record]) -> str:
    """Steps of each subject, the fastest exact one first, then FCDP's speed over its rivals."""
    compared = by_subject(records)
    present = {name for group in compared for name in group}
    names = sorted(present, key=lambda name: _place(name, compared))
    rows = [(_named(name), *(_step(group, name) for group in compared)) for name in names]
    pairs = [Comparison(group["fcdp"], rivals.best(group.values())) for group in compared]
    rows.append(("FCDP over the best exact rival", *map(_over_which, pairs)))
    for title, over in _OVER.items():
        beside = [Comparison(group["fcdp"], _fastest(group, over)) for group in compared]
        if any(pair.over for pair in beside):
            rows.append((title, *map(text.compared, beside)))
            pairs += beside
    least = [*map(_least, compared)]
    if {*least} != {text.ABSENT}:
        rows.append(("ZeRO-3 sends at least", *least))
    return text.table(("Strategy", *map(_column, compared)), rows) + noted(pairs)


def on_one_gpu(records: Sequence[Record]) -> str:
    """Steps on a GPU that all ranks share, by strategy, tuning, micro-batches and link.

    Empty without a cell that ran on one, as a rehearsal on CPUs did not.
    """
    ran = _on_gpus(records)
    if not ran:
        return ""
    shown = {(_named(of.cell.subject), _where(of)): _with_mfu(of) for of in ran}
    cell = ran[0].cell
    return (
        f"*Emulated on one GPU* ({ran[0].hardware['gpu']}), which {cell.cluster.nodes} nodes × "
        f"{cell.cluster.ranks_per_node} ranks share: {cell.model.name}, "
        f"{cell.micro_batch * cell.sequence_length:,} tokens per rank and micro-batch, NCCL by "
        f"sockets inside nodes and across. Medians of {cell.steps} steps; MB that one node sends; "
        f"MFU of the card.\n\n{crossed('Strategy', shown)}"
    )


def memory_on_one_gpu(records: Sequence[Record]) -> str:
    """Memory of the rank that takes most, of the same cells; empty without one that ran."""
    ran = _on_gpus(records)
    if not ran:
        return ""
    rows = []
    for record in ran:
        at = record.measurement
        assert at is not None
        sizes = at.peak_device_bytes, at.peak_host_bytes, at.host_cache_bytes
        in_gb = (text.number(None if size is None else size / 1e9) for size in sizes)
        rows.append((_named(record.cell.subject), _where(record), *in_gb))
    words = ("Strategy", "Cell")
    head = (*words, "device", "host", "of it the cache")
    shown = text.table(head, rows, words)
    return f"`{ran[0].cell.matrix}`: GB of the rank that takes most, at its peak.\n\n{shown}"


def _on_gpus(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.measurement and record.hardware.get("gpu")]


def _where(record: Record) -> str:
    return f"{rivals.condition(record.cell)}, {link(record)}"


def _with_mfu(record: Record) -> str:
    share = measured_mfu(record)
    return step(record) if share is None else f"{step(record)}, {share:.0%}"


def parts(records: Sequence[Record]) -> str:
    """A step with each of FCDP's parts added, and its speed over the step without that part."""
    compared, rows, pairs = by_subject(records), [], list[Comparison]()
    for before, (subject, title) in zip(("", *_PARTS), _PARTS.items(), strict=False):
        beside = [Comparison(group[subject], group.get(before)) for group in compared]
        rows.append((title, *map(_with_speed, beside)))
        pairs += beside
    return text.table(("Part", *map(_column, compared)), rows) + noted(pairs)


def _column(group: _Group) -> str:
    return rivals.condition(group["fcdp"].cell)


def _place(name: str, compared: Sequence[_Group]) -> tuple[bool, float]:
    """Exact subjects first; of these by seconds over FCDP's, where both ran."""
    both = [Comparison(group["fcdp"], group[name]) for group in compared if name in group]
    over = [pair.ratio for pair in both if pair.ratio]
    return not rivals.is_exact(both[0].over), geometric_mean(over)


def _fastest(group: _Group, names: Sequence[str]) -> Record | None:
    there = (group[name] for name in names if name in group)
    return max(there, key=lambda record: record.tokens_per_s or 0.0, default=None)


def _named(subject: str) -> str:
    """A subject's label; as code where that is the strategy's name."""
    label = strategies.label(subject)
    return f"`{label}`" if label == subject else label


def _step(group: _Group, name: str) -> str:
    return step(group[name]) if name in group else text.ABSENT


def _over_which(pair: Comparison) -> str:
    return f"{text.compared(pair)}, {_named(pair.over.cell.subject)}" if pair.over else text.ABSENT


def _with_speed(pair: Comparison) -> str:
    """Seconds, MB and speed without their units, which a caption says."""
    sent = pair.of.measurement and pair.of.measurement.inter_node_bytes_per_step
    shown = [text.number(pair.of.step_seconds_median), text.megabytes(sent)]
    return ", ".join([*shown, text.compared(pair)] if pair.over else shown)


def _least(group: _Group) -> str:
    zero3 = group["fsdp2"].measurement if "fsdp2" in group else None
    return f"{text.megabytes(zero3.inter_node_bytes_closed_form)} MB" if zero3 else text.ABSENT

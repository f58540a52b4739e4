"""What records of lossless differences say, as Markdown for the README and docs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from analysis import text
from experiments.records.comparison import Comparison
from experiments.records.record import Record
from scripts.tables import noted
from simulation.quantities import format_link


def on_the_slow_link(records: Sequence[Record]) -> str:
    """How much faster than the slowest each is, on the limited link with most micro-batches."""
    chosen = _limited(records)
    first = chosen[0].cell
    link, count = format_link(first.inter_bandwidth_bits_per_s), first.accumulation
    head = (f"On {link}, k = {count}", "tokens/s", f"over {first.subject}", "MB/step")
    rows = []
    for record, factor in zip(chosen, _factors(chosen), strict=True):
        assert record.measurement is not None
        sent = text.megabytes(record.measurement.inter_node_bytes_per_step)
        rows.append((record.cell.subject, text.number(record.tokens_per_s), factor, sent))
    return text.table(head, rows) + noted(Comparison(of, chosen[0]) for of in chosen[1:])


def in_a_sentence(records: Sequence[Record]) -> str:
    """The same of DeepSpeed's ZeRO-3, FCDP, its differences, and those with reductions in int8."""
    chosen = _limited(records)
    _, plain, told, rounded = _factors(chosen)
    link = format_link(chosen[0].cell.inter_bandwidth_bits_per_s)
    return (
        f"Fine-tuned in full and in bf16 at {link} with k = {chosen[0].cell.accumulation}, the "
        f"same model trains {plain} as fast with FCDP as with DeepSpeed's\nZeRO-3, {told} where "
        f"gathers tell lossless [differences](docs/differences.md), and {rounded} with reductions "
        "in int8 too\n([records](results/delta/records.jsonl))."
    )


def _limited(records: Sequence[Record]) -> list[Record]:
    limited = [r for r in records if r.tokens_per_s and r.cell.inter_bandwidth_bits_per_s]
    most = max(record.cell.accumulation for record in limited)
    found = [record for record in limited if record.cell.accumulation == most]
    return sorted(found, key=lambda record: record.tokens_per_s or 0.0)


def _factors(records: Sequence[Record]) -> list[str]:
    return [text.times(1), *(text.compared(Comparison(of, records[0])) for of in records[1:])]


def on_a_free_link(records: Sequence[Record]) -> str:
    """Steps with the rule for differences beside those without."""
    by: dict[int, dict[str, Record]] = {}
    for record in records:
        codec = str(record.cell.settings.model_dump()["gather_codec"])
        by.setdefault(record.cell.micro_batch, {})[codec] = record
    rows = []
    for size, of in by.items():
        seconds = [text.number(of[codec].step_seconds_median) for codec in ("none", "delta")]
        rows.append((str(size), *seconds, text.compared(Comparison(of["delta"], of["none"]))))
    head = ("Micro-batch", "whole, s/step", "`delta`, s/step", "times as fast")
    return text.table(head, rows, words=())


def over_seeds(records: Sequence[Record]) -> str:
    """Held-out losses of each codec of reductions, over seeds, beside those of exact ones."""
    losses: dict[tuple[float, str], list[float]] = {}
    for record in records:
        found = record.measurement and record.measurement.held_out_loss
        if found is not None:
            codec = str(record.cell.settings.model_dump()["reduce_codec"])
            losses.setdefault((record.cell.learning_rate, codec), []).append(found)
    rows = []
    for (rate, codec), of in losses.items():
        exact = losses[rate, "none"]
        apart = [100 * (mine / other - 1) for mine, other in zip(of, exact, strict=True)]
        columns = (
            f"{rate:g}",
            "exact" if codec == "none" else codec,
            str(len(of)),
            f"{mean(of):.3f} ± {stdev(of):.3f}",
            text.ABSENT if codec == "none" else f"{mean(apart):+.2f} ± {stdev(apart):.2f} %",
        )
        rows.append(columns)
    head = ("Learning rate", "Reductions", "seeds", "held-out loss")
    return text.table((*head, "over the exact one, seed by seed"), rows, words=head[1:2])

"""Writes tables of the README and docs: from the committed records, a command, matrices' types.

python -m scripts.readme           rewrite the pages
python -m scripts.readme --check   fail if that would change one
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from analysis import text
from analysis.claims import papers
from analysis.compare import orders
from analysis.compare.audit import Finding, audit
from analysis.load import runs
from analysis.load.table import latest, load
from analysis.report import reproduction
from experiments.records.cell import Cell
from experiments.records.record import Machine, Record
from experiments.records.repeats import pooled, within_spread
from experiments.records.variants import ranked
from experiments.terminal import variants_table
from experiments.terminal.summary_table import summary
from scripts import co2, differences, matrices
from simulation.quantities import format_link

ROOT = Path(__file__).resolve().parent.parent
_PLAN = (
    "plan --model gpt-30b --nodes 4 --gpus 8 --gpu a40 --inter-node 1Gbps --peft lora:8 "
    "--price-per-gpu-hour 0.5 "
    "--strategies fsdp2,fsdp2-hsdp,ddp,hpz,deepspeed-hpz,deepspeed-zero3,fcdp"
)
_RESULT_HEAD = (
    "| Trained | DeepSpeed s | FSDP2 s | FCDP s | over the faster | ZeRO-3 at least MB "
    "| DeepSpeed MB | FSDP2 MB | FCDP MB |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)
_HEAD = (
    "| Model | Tuning | Link | Micro-batches | ZeRO-3, DeepSpeed s/step | ZeRO-3, FSDP2 s/step "
    "| FCDP s/step | speed-up | over FSDP2 | DeepSpeed MB/step | FSDP2 MB/step | FCDP MB/step "
    "| FCDP minimum |\n"
    "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


#: The marked places of each page, and what is written there.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "result": lambda: _result(load(_records("reference"))),
        "differences": lambda: differences.in_a_sentence(load(_records("delta"))),
    },
    "docs/differences.md": {
        "slow-link": lambda: differences.on_the_slow_link(load(_records("delta"))),
        "free-link": lambda: differences.on_a_free_link(load(_records("delta-unshaped"))),
        "quantised": lambda: differences.over_seeds(load(_records("quantised"))),
    },
    "docs/quickstart.md": {"quickstart": lambda: _printed("quickstart")},
    "docs/planning.md": {"plan": lambda: _answered(_PLAN)},
    "docs/measurements.md": {
        "reference": lambda: _condensed(load(_records("reference"))),
        "unshaped": lambda: _condensed(load(_records("unshaped"))),
        "unshaped-repeated": lambda: _condensed(pooled(load(_records("unshaped-repeated")))),
        "link-bound": lambda: _bound_by_the_link(load(_records("link-bound"))),
        "slow-link": lambda: _kept(load(_records("slow-link"))),
        "paper-emulated": lambda: _speeds(load(_records("paper-emulated"))),
    },
    "docs/simulator.md": {"orders": lambda: _ordered()},
    "docs/memory.md": {"frozen": lambda: _by_base(load(_records("frozen")))},
    "docs/ablations.md": {"ablation": lambda: _ablated(latest(load(_records("ablation"))))},
    "docs/matrices.md": {
        "cells": matrices.of_cells,
        "strategies": matrices.of_strategies,
        "clusters": matrices.of_clusters,
        "models": matrices.of_models,
        "data": matrices.of_data,
        "optimizers": matrices.of_optimizers,
    },
    "docs/strategies.md": {
        "audit": lambda: _audited(audit(load(_records("parity")))),
        "baselines": lambda: _speeds(load(_records("baselines"))),
        "workers": lambda: co2.kept(
            [load(_records(f"co2-scaling/{workers}")) for workers in ("two", "four", "eight")]
        ),
        "lag-short": lambda: co2.lag(load(_records("co2-loss"))),
        "lag-longer": lambda: co2.lag(load(_records("co2-long"))),
        "lag-long": lambda: co2.lag(load(_records("co2-tuned"))),
        "behind": lambda: co2.behind(load(_records("co2-ablation"))),
    },
}


def _ordered() -> str:
    """How many pairs of cells the simulator has in the right order, and what its choice costs."""
    found = [run for run in runs.load(ROOT / "results") if isinstance(run, runs.Run)]
    rows = orders.rows(reproduction.orders_of(papers.load(), found))
    names = {
        "together, if nothing ran beside": "beside which nothing is known to have run",
        "together": "all",
    }
    lines = [
        "| Matrices | Pairs | In the right order | Choices | Cost more, median | at most |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row.matrix in names:
            of = (names[row.matrix], row.pairs, row.right, row.choices)
            costs = (row.median_cost, row.largest_cost)
            lines.append(f"| {' | '.join(map(str, (*of, *costs)))} |")
    return "\n".join(lines)


def rewritten(page: str, text: str) -> str:
    """The page's text with each marked place filled; raises ``ValueError`` if one is missing."""
    for name, table in PAGES[page].items():
        place = re.compile(f"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        filled = table().replace("\\", r"\\")
        text, count = place.subn(rf"\g<1>{filled}\n\g<2>", text)
        if count != 1:
            raise ValueError(f"{page}: found {count} places for {name}, expected 1")
    return text


def _records(matrix: str) -> Path:
    return ROOT / "results" / matrix / "records.jsonl"


def _printed(matrix: str) -> str:
    """What the command prints at its end."""
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(load(_records(matrix))))
    lines = (line.rstrip() for line in console.export_text().strip("\n").splitlines())
    return "```text\n" + "\n".join(lines) + "\n```"


def _answered(command: str) -> str:
    """The command and what it prints."""
    arguments = [sys.executable, "-m", "experiments", *shlex.split(command)]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True)
    shown = command.replace(" --peft", " \\\n    --peft").replace(" --strat", " \\\n    --strat")
    lines = (line.rstrip() for line in result.stdout.strip("\n").splitlines())
    return f"```console\n$ python -m experiments {shown}\n" + "\n".join(lines) + "\n```"


def _result(records: Sequence[Record]) -> str:
    """The README's four rows: one model on one link, by what is trained and micro-batches."""
    lines = [_RESULT_HEAD]
    for setting, by in _comparisons(records).items():
        model, tuning, link, micro_batches = setting
        if (model, link) == ("gpt2-4x256", "100 Mbit/s"):
            deepspeed, fsdp2, fcdp = (by[name] for name in ("deepspeed-zero3", "fsdp2", "fcdp"))
            slower = [_faster(fcdp, other) or math.inf for other in (deepspeed, fsdp2)]
            columns = [
                f"{tuning}, k = {micro_batches}".replace(" = ", "\u00a0=\u00a0"),
                *(text.number(_seconds(record)) for record in (deepspeed, fsdp2, fcdp)),
                text.times(min(slower)),
                text.number(_least_megabytes(fsdp2)),
                *(text.number(_megabytes(record)) for record in (deepspeed, fsdp2, fcdp)),
            ]
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _comparisons(records: Sequence[Record]) -> dict[tuple[object, ...], dict[str, Record]]:
    """Records by setting, then by strategy."""
    comparisons: dict[tuple[object, ...], dict[str, Record]] = {}
    for record in records:
        if record.state != "skipped":
            comparisons.setdefault(_setting(record.cell), {})[record.cell.strategy] = record
    return comparisons


def _condensed(records: Sequence[Record]) -> str:
    """One row per comparison, as Markdown."""
    rows = (_row(setting, by) for setting, by in _comparisons(records).items())
    return "\n".join([_HEAD, *rows])


def _kept(records: Sequence[Record]) -> str:
    """How much of its own speed each strategy keeps on a slow link, as Markdown."""
    links = sorted({r.cell.inter_bandwidth_bits_per_s for r in records}, key=lambda bits: bits or 0)
    open_link, slow = links  # None, no limit, sorts first
    by = {(r.cell.strategy, r.cell.inter_bandwidth_bits_per_s): r for r in records}
    names = list(dict.fromkeys(r.cell.strategy for r in records))
    lines = [
        f"| Strategy | unshaped tokens/s | {format_link(slow)} tokens/s | keeps "
        f"| over {names[0]} | MB/step |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in names:
        fast, limited, first = by[name, open_link], by[name, slow], by[names[0], slow]
        rates = [record.tokens_per_s or math.nan for record in (fast, limited, first)]
        columns = [
            name,
            text.number(rates[0]),
            text.number(rates[1]),
            f"{rates[1] / rates[0]:.1%}",
            text.times(rates[1] / rates[2]),
            text.number(_megabytes(limited)),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*lines, "", _trained_share(records)])


def _bound_by_the_link(records: Sequence[Record]) -> str:
    """Each cell's step beside the seconds that its bytes take on the link, as Markdown."""
    lines = [
        "| Model | Strategy | MB/step | bytes ÷ bandwidth s | s/step | times that |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for record in records:
        seconds, sent = _seconds(record), _megabytes(record)
        bits = record.cell.inter_bandwidth_bits_per_s
        assert seconds is not None
        assert sent is not None
        assert bits is not None
        least = sent * 8e6 / bits
        columns = [
            record.cell.model.name,
            record.cell.subject,
            text.number(sent),
            text.number(least),
            text.number(seconds),
            f"{seconds / least:.2f}×",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _by_base(records: Sequence[Record]) -> str:
    """Steps, and DDP's memory, by the type in which frozen parameters are held, as Markdown."""
    names = list(dict.fromkeys(record.cell.strategy for record in records))
    lines = [f"| Base in | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    by = {(r.cell.frozen_dtype, r.cell.strategy): r.step_seconds_median for r in records}
    for dtype in dict.fromkeys(dtype for dtype, _ in by):
        columns = [text.number(by[dtype, name]) for name in names]
        lines.append(f"| {dtype} | {' | '.join(columns)} |")
    peaks = [
        f"{record.measurement.peak_host_bytes / 1e6:.0f} MB with {record.cell.frozen_dtype}"
        for record in records
        if record.cell.strategy == "ddp" and record.measurement
    ]
    return "\n".join([*lines, "", f"At its peak a rank of DDP takes {', '.join(peaks)}."])


def _ablated(records: Sequence[Record]) -> str:
    """A table for each number of micro-batches, the variants ranked, as Markdown."""
    parts = []
    for count in dict.fromkeys(record.cell.accumulation for record in records):
        variants = ranked([record for record in records if record.cell.accumulation == count])
        rows = [variants_table.row(variant) for variant in variants]
        titles = [title for title in rows[0] if any(row[title] != "–" for row in rows)]
        parts += [
            f"{count} micro-batch{'es' * (count > 1)} per step:\n",
            f"| {' | '.join(title.replace(chr(10), ' ') for title in titles)} |",
            f"|---|{'--:|' * (len(titles) - 1)}",
            *(f"| {' | '.join(row[title] for title in titles)} |" for row in rows),
            "",
        ]
    machines = [record.machine for record in records if record.machine]
    busy = [machine for machine in machines if machine.why_busy]
    worst = max(busy, key=lambda machine: (machine.steal_share, machine.load), default=None)
    return "\n".join([*parts, "The machine was quiet." if worst is None else _busy(worst)])


def _busy(worst: Machine) -> str:
    return (
        f"The machine was busy, at worst: {worst.why_busy}. Times are those of that day; bytes, "
        "hits and entries are not."
    )


def _trained_share(records: Sequence[Record]) -> str:
    counts = {(m.trainable_parameters, m.parameters) for r in records if (m := r.measurement)}
    ((trained, total),) = counts
    return f"Trained: {trained:,} of {total:,} parameters, {trained / total:.2%}."


def _speeds(records: Sequence[Record]) -> str:
    """Tokens per second of each strategy, one column per setting, as Markdown."""
    ran = [record for record in records if record.state != "skipped"]
    settings = list(dict.fromkeys(_setting(record.cell)[1:] for record in ran))
    names = [f"{tuning}, {link}, k = {count}" for tuning, link, count in settings]
    lines = [f"| Strategy | {' | '.join(names)} |", f"|---|{'--:|' * len(settings)}"]
    by = {(r.cell.strategy, *_setting(r.cell)[1:]): r for r in ran}
    for strategy in dict.fromkeys(record.cell.strategy for record in ran):
        rates = [_rate(by.get((strategy, *setting))) for setting in settings]
        lines.append(f"| {strategy} | {' | '.join(rates)} |")
    return "\n".join([*lines, *_noise(ran)])


def _noise(records: Sequence[Record]) -> list[str]:
    """What of their speeds no link explains, as a paragraph; nothing where there is nothing."""
    by: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for record in records:
        cell, rate = record.cell, record.tokens_per_s
        if rate is not None:
            key = cell.strategy, cell.model.name, cell.tuning, cell.accumulation
            link = cell.inter_bandwidth_bits_per_s or math.inf
            by.setdefault(key, []).append((link, rate))
    # Of each, the most that a slower link is faster than a faster one.
    most = [max((a / b for x, a in own for y, b in own if x < y), default=0) for own in by.values()]
    odd = [factor for factor in most if factor > 1]
    if not odd:
        return []
    return [
        "",
        f"In {len(odd)} of {len(most)} comparisons of links a slower one is faster, by up to "
        f"{text.times(max(odd))}: the machine was shared with other work, and differences of that "
        "size are noise.",
    ]


def _audited(findings: Sequence[Finding]) -> str:
    """How much more than its least each strategy sends, one column per setting, as Markdown."""
    settings = list(dict.fromkeys((f.cell.tuning, f.cell.accumulation) for f in findings))
    names = [f"{tuning}, k = {count}" for tuning, count in settings]
    lines = [
        f"| Strategy | {' | '.join(names)} | loss from fsdp2's, at most | verdict |",
        f"|---|{'--:|' * (len(settings) + 1)}---|",
    ]
    by: dict[str, list[Finding]] = {}
    for finding in findings:
        by.setdefault(finding.cell.variant, []).append(finding)
    for strategy, own in by.items():
        differences = [f.loss_difference for f in own if f.loss_difference is not None]
        factors = {(f.cell.tuning, f.cell.accumulation): text.times(f.factor) for f in own}
        columns = [
            strategy,
            *(factors.get(setting, text.ABSENT) for setting in settings),
            text.number(max(differences, default=None), 2),
            "; ".join(dict.fromkeys(p for f in own for p in f.problems)) or "fair",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    reasons = dict.fromkeys(reason for f in findings for reason in f.explanations)
    return "\n".join([*lines, "", *(f"- {reason}." for reason in reasons)])


def _rate(record: Record | None) -> str:
    if record is None or record.tokens_per_s is None:
        return "–" if record is None else record.state
    return text.number(record.tokens_per_s)


def _setting(cell: Cell) -> tuple[object, ...]:
    link = format_link(cell.inter_bandwidth_bits_per_s)
    return cell.model.name, cell.tuning, link, cell.accumulation


def _row(setting: tuple[object, ...], by_strategy: dict[str, Record]) -> str:
    deepspeed, fsdp2, fcdp = (
        by_strategy.get(name) for name in ("deepspeed-zero3", "fsdp2", "fcdp")
    )
    cells = [
        *map(str, setting),
        *(text.number(_seconds(record)) for record in (deepspeed, fsdp2, fcdp)),
        _gain(fcdp, deepspeed),
        _gain(fcdp, fsdp2),
        *(text.number(_megabytes(record)) for record in (deepspeed, fsdp2, fcdp)),
        text.number(_least_megabytes(fcdp)),
    ]
    return "| " + " | ".join(cells) + " |"


def _gain(record: Record | None, other: Record | None) -> str:
    """How many times as fast; none within the spread of their steps."""
    within = record is not None and other is not None and within_spread(record, other)
    return "none" if within else text.times(_faster(record, other))


def _seconds(record: Record | None) -> float | None:
    return None if record is None else record.step_seconds_median


def _faster(record: Record | None, other: Record | None) -> float | None:
    mine, theirs = _seconds(record), _seconds(other)
    return None if mine is None or theirs is None else theirs / mine


def _megabytes(record: Record | None) -> float | None:
    if record is None or record.measurement is None:
        return None
    return record.measurement.inter_node_bytes_per_step / 1e6


def _least_megabytes(record: Record | None) -> float | None:
    if record is None or record.measurement is None:
        return None
    least = record.measurement.inter_node_bytes_closed_form
    return None if least is None else least / 1e6


def main(arguments: Sequence[str]) -> int:
    differs = False
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = rewritten(page, before)
        if "--check" not in arguments:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            print(f"{page} differs from the records: run python -m scripts.readme")
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tables of the README and docs over committed records, as Markdown."""

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from statistics import mean, median, stdev
from typing import Any
from xml.etree.ElementTree import ElementTree

from analysis import strategies, text
from analysis.compare.audit import Finding
from baselines.settings import CO2Settings
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, few, grouped, groups, interval, paired
from experiments.records.record import METRICS, Machine, Record
from experiments.terminal import variants_table
from experiments.terminal.variants_table import ranked
from simulation.quantities import format_link

_WORDS = ("Model", "Tuning", "Link")


def crossed(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """Cells by the names of their row and their column, as Markdown; a dash where there is none."""
    rows, columns = (dict.fromkeys(place[at] for place in cells) for at in (0, 1))
    lines = ((row, *(cells.get((row, name), text.ABSENT) for name in columns)) for row in rows)
    return text.table((corner, *columns), lines)


def by_subject(records: Sequence[Record]) -> list[dict[str, Record]]:
    """The records of each comparison that ran, by what is compared."""
    ran = [record for record in records if record.measurement]
    return [{record.cell.subject: record for record in group} for group in groups(ran)]


def by_phase(records: Sequence[Record]) -> str:
    """A table per objective: what an iteration takes by phase, beside FSDP2's, as Markdown."""
    parts = []
    head = ("Strategy", "generation", "log-probabilities", "update", "iteration", "over FSDP2")
    for group in groups([record for record in records if record.measurement]):
        first = next(record for record in group if record.cell.subject == "fsdp2")
        rows = [
            (
                record.cell.subject,
                *(_of_phase(record, name) for name in ("generation", "scoring", "update")),
                step(record),
                text.ABSENT if record is first else text.compared(Comparison(record, first)),
                text.megabytes(_measured(record, "iteration_device_bytes")),
            )
            for record in group
        ]
        shown = text.table((*head, "device memory MB"), rows)
        parts.append(f"{first.cell.objective.name}, {text.TUNINGS[first.cell.tuning]}:\n\n{shown}")
    return "\n\n".join(parts)


def _of_phase(record: Record, phase: str) -> str:
    seconds, sent = (_measured(record, f"{phase}_{of}") for of in ("seconds", "bytes"))
    return f"{text.number(seconds)} s, {text.megabytes(sent)} MB" if seconds else text.ABSENT


def by_rollout(records: Sequence[Record]) -> str:
    """A row per source of answers: an iteration and the rollouts' metrics, as Markdown."""
    metrics = {n: m for n, m in METRICS.items() if {_measured(r, n) for r in records} - {None}}
    rows = [
        (
            record.cell.objective.name,
            f"{record.cell.learning_rate:g}",
            step(record),
            *(text.metric(metric, _measured(record, name)) for name, metric in metrics.items()),
        )
        for record in records
    ]
    head = ("Answers", "learning rate", "iteration")
    return text.table((*head, *(metric.title for metric in metrics.values())), rows)


def condensed(records: Sequence[Record]) -> str:
    """One row per comparison, as Markdown: steps and bytes of each subject, speed-ups of FCDP's."""
    by = by_subject(records)
    names = strategies.ordered(name for group in by for name in group)
    over = names[: names.index("fcdp")]
    speeds = [[Comparison(group["fcdp"], group.get(name)) for name in over] for group in by]
    rows = [
        (
            *map(str, _setting(group["fcdp"].cell)),
            *(text.number(_seconds(group.get(name))) for name in names),
            *map(text.compared, beside),
            *(text.megabytes(_sent(group.get(name))) for name in names),
            text.megabytes(_least(group["fcdp"])),
        )
        for group, beside in zip(by, speeds, strict=True)
    ]
    titles = {name: strategies.label(name) for name in names}
    head = (
        *(*_WORDS, "Micro-batches"),
        *(f"{titles[name]} s/step" for name in names),
        *(f"over {titles[name]}" for name in over),
        *(f"{titles[name]} MB/step" for name in names),
        "FCDP minimum",
    )
    return text.table(head, rows, _WORDS) + noted(chain.from_iterable(speeds))


def retention(records: Sequence[Record]) -> str:
    """How much of its own speed each strategy keeps on a slow link, as Markdown."""
    links = sorted({r.cell.inter_bandwidth_bits_per_s for r in records}, key=lambda bits: bits or 0)
    # None, no limit, sorts first.
    free, slow = (
        [r for r in records if r.cell.inter_bandwidth_bits_per_s == bits] for bits in links
    )
    first, speeds = slow[0], list[Comparison]()
    rows, slow_link = [], format_link(links[1])
    for limited, fast in paired(slow, free, lambda record: record.cell.strategy):
        keeps, over = Comparison(limited, fast), Comparison(limited, first)
        speeds += [keeps, *([over] if limited is not first else [])]
        columns = (
            limited.cell.strategy,
            text.number(fast.tokens_per_s),
            text.number(limited.tokens_per_s),
            text.share(keeps),
            text.times(1) if limited is first else text.compared(over),
            text.megabytes(_sent(limited)),
        )
        rows.append(columns)
    head = ("Strategy", "unshaped tokens/s", f"{slow_link} tokens/s", "keeps")
    shown = text.table((*head, f"over {first.cell.strategy}", "MB/step"), rows)
    return f"{shown}{noted(speeds)}\n\n{_trained_share(records)}"


def bound_by_the_link(records: Sequence[Record]) -> str:
    """Each cell's step beside the seconds that its bytes take on the link, as Markdown."""
    rows = []
    for record in records:
        seconds, sent = _seconds(record), _sent(record)
        bits = record.cell.inter_bandwidth_bits_per_s
        assert seconds is not None
        assert sent is not None
        assert bits is not None
        least = sent * 8 / bits
        columns = (
            record.cell.model.name,
            record.cell.subject,
            text.megabytes(sent),
            text.number(least),
            text.number(seconds),
            f"{seconds / least:.2f}×",
        )
        rows.append(columns)
    words = ("Model", "Strategy")
    numbers = ("MB/step", "bytes ÷ bandwidth s", "s/step", "times that")
    return text.table((*words, *numbers), rows, words)


def by_base(records: Sequence[Record]) -> str:
    """Steps, and DDP's memory, by the type in which frozen parameters are held, as Markdown."""
    by = {(r.cell.frozen_dtype, r.cell.strategy): text.number(_seconds(r)) for r in records}
    peaks = [
        f"{record.measurement.peak_host_bytes / 1e6:.0f} MB with {record.cell.frozen_dtype}"
        for record in records
        if record.cell.strategy == "ddp" and record.measurement
    ]
    return f"{crossed('Base in', by)}\n\nAt its peak a rank of DDP takes {', '.join(peaks)}."


def by_kind(records: Sequence[Record]) -> str:
    """Steps of adapters by their base and strategy, as Markdown, and how far apart losses are.

    Seconds, MB that a node sends per step, and MB of host memory that a rank takes at its peak; and
    MB of a rank's entries in FCDP's cache.
    """
    by: dict[tuple[str, str], str] = {}
    entries: dict[tuple[str, str], str] = {}
    losses: dict[str, list[list[float]]] = {}
    for record in records:
        cell, measured = record.cell, record.measurement
        if measured is None:
            continue
        base = f"{cell.model.name}, {cell.frozen_dtype}"
        peak = text.megabytes(measured.peak_host_bytes)
        by[base, f"`{cell.strategy}`"] = f"{step(record)}, {peak} MB"
        if measured.cache is not None:
            nbytes = sum(measured.cache.entry_bytes.values())
            entries[base, "entries"] = f"{text.megabytes(nbytes)} MB"
        losses.setdefault(base, []).append(measured.losses)
    steps = (each for of_base in losses.values() for each in zip(*of_base, strict=True))
    apart = max(max(each) / min(each) - 1 for each in steps)
    return (
        f"{crossed('Base', by | entries)}\n\nLosses of a step with one base are at most "
        f"{100 * apart:.2g} % apart, by the order of sums in bfloat16."
    )


def ablated(records: Sequence[Record]) -> str:
    """A table for each number of micro-batches, the variants ranked, as Markdown."""
    parts = []
    for count in dict.fromkeys(record.cell.accumulation for record in records):
        variants = ranked([record for record in records if record.cell.accumulation == count])
        rows = [variants_table.row(variant) for variant in variants]
        titles = [title for title in rows[0] if any(row[title] != "–" for row in rows)]
        head = [title.replace("\n", " ") for title in titles]
        shown = text.table(head, ([row[title] for title in titles] for row in rows))
        parts += [f"{count} micro-batch{'es' * (count > 1)} per step:\n", shown, ""]
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


def speeds(records: Sequence[Record]) -> str:
    """Tokens per second of each strategy, one column per setting, as Markdown."""
    ran = [record for record in records if record.state != "skipped"]
    by = {}
    for record in ran:
        _, tuning, link, count = _setting(record.cell)
        rate = record.tokens_per_s
        shown = record.state if rate is None else text.number(rate)
        by[record.cell.strategy, f"{tuning}, {link}, k = {count}"] = shown
    return crossed("Strategy", by) + _noise(ran)


def _noise(records: Sequence[Record]) -> str:
    """Speeds that no link explains, as a paragraph; nothing where there are none."""
    slowest = sorted(records, key=lambda record: record.cell.inter_bandwidth_bits_per_s or math.inf)
    alike = grouped(slowest, lambda of: (of.cell.strategy, *_setting(of.cell, link=False)))
    # By group, the most by which a slower link is the faster one.
    most = [
        max((Comparison(*two).ratio or 0 for two in combinations(group, 2)), default=0)
        for group in alike
    ]
    odd = [factor for factor in most if factor > 1]
    if not odd:
        return ""
    return (
        f"\n\nIn {len(odd)} of {len(most)} comparisons of links a slower one is faster, by up to "
        f"{text.times(max(odd))}: differences of that size are noise."
    )


def audited(findings: Sequence[Finding]) -> str:
    """How much more than its least each strategy sends, one column per setting, as Markdown.

    ``of expected`` is what it sends over what its transport and their headers need.
    """
    settings = _settings(findings)
    rows = []
    for group in grouped(findings, lambda finding: finding.cell.variant):
        differences = [f.loss_difference for f in group if f.loss_difference is not None]
        ratios = [f.of_expected for f in group if f.of_expected is not None]
        columns = (
            group[0].cell.variant,
            *_by_setting(group, settings, lambda finding: text.times(finding.factor)),
            text.one_or_range(ratios, "ratio"),
            text.number(max(differences, default=None), 2),
            "; ".join(dict.fromkeys(f.verdict for f in group if f.verdict != "fair")) or "fair",
        )
        rows.append(columns)
    words = ("Strategy", "verdict")
    numbers = (*settings.values(), "of expected", "loss from fsdp2's, at most")
    shown = text.table((words[0], *numbers, words[1]), rows, words)
    reasons = dict.fromkeys(reason for f in findings for reason in f.explanations)
    return "\n".join([shown, "", *(f"- {reason}." for reason in reasons)])


def counted(findings: Sequence[Finding]) -> str:
    """Bytes over those that transport and headers need, a column per setting, as Markdown."""
    settings = _settings(findings)
    rows = [
        (
            group[0].cell.variant,
            *_by_setting(group, settings, lambda finding: text.number(finding.of_expected)),
        )
        for group in grouped(findings, lambda finding: finding.cell.variant)
    ]
    return text.table(("Strategy", *settings.values()), rows, ("Strategy",))


def _settings(findings: Sequence[Finding]) -> dict[tuple[str, int], str]:
    """Titles of columns by tuning and micro-batches per step."""
    each = ((finding.cell.tuning, finding.cell.accumulation) for finding in findings)
    return {(tuning, count): f"{tuning}, k = {count}" for tuning, count in each}


def _by_setting(
    group: Sequence[Finding],
    settings: Iterable[tuple[str, int]],
    show: Callable[[Finding], str],
) -> list[str]:
    shown = {(of.cell.tuning, of.cell.accumulation): show(of) for of in group}
    return [shown.get(setting, text.ABSENT) for setting in settings]


def _setting(cell: Cell, link: bool = True) -> tuple[object, ...]:
    of = format_link(cell.inter_bandwidth_bits_per_s) if link else None
    return cell.model.name, cell.tuning, of, cell.accumulation


def noted(speeds: Iterable[Comparison]) -> str:
    """A warning about few rounds, as a paragraph below a table; nothing where there are enough."""
    warning = few(speeds)
    return f"\n\n{warning}." if warning else ""


def _seconds(record: Record | None) -> float | None:
    return None if record is None else record.step_seconds_median


def link(record: Record) -> str:
    return format_link(record.cell.inter_bandwidth_bits_per_s)


def step(record: Record) -> str:
    return f"{text.number(_seconds(record))} s, {text.megabytes(_sent(record))} MB"


def _measured(record: Record | None, name: str) -> float | None:
    metric: float | None = getattr(record and record.measurement, name, None)
    return metric


_sent = partial(_measured, name="inter_node_bytes_per_step")
_least = partial(_measured, name="inter_node_bytes_closed_form")
_held_out = partial(_measured, name="held_out_loss")


def behind(records: Sequence[Record]) -> str:
    """Held-out loss behind DDP's, seed by seed, of each penalty (rows) and clipping (columns)."""
    by: dict[tuple[str, float | None], dict[int, float]] = {}
    beside: dict[int, float] = {}
    for record in records:
        settings, loss = record.cell.settings, _held_out(record)
        if loss is None:
            continue
        if isinstance(settings, CO2Settings):
            by.setdefault((settings.penalty, settings.clip), {})[record.cell.seed] = loss
        elif record.cell.strategy == "ddp":
            beside[record.cell.seed] = loss
    lags = {
        (f"`{penalty}`", "no clipping" if clip is None else f"φ = {clip:g}"): _lag(of, beside)
        for (penalty, clip), of in by.items()
    }
    return crossed("Penalty", lags)


def lag(records: Sequence[Record]) -> str:
    """Held-out loss behind DDP's over intervals, each at the learning rate of most seeds."""
    losses: dict[tuple[int, str], dict[float, dict[int, float]]] = {}
    for record in records:
        loss, cell = _held_out(record), record.cell
        if loss is None:
            continue
        of = (getattr(cell.settings, "interval", 0), _name(record))
        of_rates = losses.setdefault(of, {}).setdefault(cell.learning_rate, {})
        of_rates[cell.seed] = loss
    chosen = {of: max(rates.values(), key=len) for of, rates in losses.items()}
    beside = chosen.pop((0, "ddp"), {})
    names = list(dict.fromkeys(name for _, name in chosen))
    rows = [
        (str(interval), *(_lag(chosen.get((interval, name), {}), beside) for name in names))
        for interval in sorted({interval for interval, _ in chosen})
    ]
    rates = dict.fromkeys(
        f"{name} {max(of, key=lambda rate: len(of[rate])):g}" for (_, name), of in losses.items()
    )
    shown = text.table(("τ", *names), rows, words=())
    return f"{shown}\n\nLearning rates: {', '.join(rates)}."


def _name(record: Record) -> str:
    settings, name = record.cell.settings, record.cell.strategy
    unpenalised = isinstance(settings, CO2Settings) and settings.penalty == "none"
    return f"{name}, no penalty" if unpenalised else name


def retention_by_workers(matrices: Sequence[Sequence[Record]]) -> str:
    """Shares of speed that strategies keep on the slow link; a column per number of workers."""
    comparisons: dict[tuple[str, str], Comparison] = {}
    for records in matrices:
        free, slow = (
            [r for r in records if (r.cell.inter_bandwidth_bits_per_s is None) is unshaped]
            for unshaped in (True, False)
        )
        for limited, fast in paired(slow, free, lambda record: record.cell.subject):
            workers = str(limited.cell.cluster.nodes)
            comparisons[_with_interval(limited), workers] = Comparison(limited, fast)
    shares = {place: text.share(keeps) for place, keeps in comparisons.items()}
    return crossed("Keeps, with workers", shares) + noted(comparisons.values())


def _with_interval(record: Record) -> str:
    settings = record.cell.settings
    interval = f", τ = {settings.interval}" if isinstance(settings, CO2Settings) else ""
    return f"{record.cell.strategy}{interval}"


def _lag(losses: dict[int, float], beside: dict[int, float]) -> str:
    """How far losses are behind others of the same seeds.

    Mean and standard deviation in per cent, to a whole one where the seeds are far apart.
    """
    shares = [loss / beside[seed] - 1 for seed, loss in losses.items() if seed in beside]
    if not shares:
        return text.ABSENT
    if len(shares) == 1:
        return f"{100 * shares[0]:.1f} %"
    middle, apart = 100 * mean(shares), 100 * stdev(shares)
    digits = 0 if apart >= 5 else 1
    return f"{middle:.{digits}f} ± {apart:.{digits}f} %"


def on_the_slow_link(records: Sequence[Record]) -> str:
    """The speed of each strategy beside FCDP without codecs, a table per model, as Markdown."""
    parts = []
    for group in _by_model(records):
        plain, cell = _of(group, "fcdp"), group[0].cell
        link = format_link(cell.inter_bandwidth_bits_per_s)
        title = f"`{cell.model.name}`, {link}, k = {cell.accumulation}"
        pairs = [Comparison(record, plain) for record in group]
        rows = [
            (
                record.cell.subject,
                text.number(record.tokens_per_s),
                text.times(1) if record is plain else text.compared(pair),
                text.megabytes(_sent(record)),
            )
            for record, pair in zip(group, pairs, strict=True)
        ]
        head = (title, "tokens/s", f"over {plain.cell.subject}", "MB/step")
        parts.append(text.table(head, rows) + noted(pairs))
    return "\n\n".join(parts)


def on_a_gpu(speed: ElementTree) -> str:
    """Pairs of steps of 16 × 1,024 tokens that a GPU's tests timed, and their ratio by rounds."""
    rows = []
    for each in speed.iterfind(".//property[@name='seconds']"):
        (plain, before), (name, after) = ast.literal_eval(each.attrib["value"]).items()
        low, high = interval(after, before)
        first, second = median(before), median(after)
        ratio = f"{second / first:.3f}× ({low:.2f}–{high:.2f})"
        tokens = text.number(16 * 1024 / first)
        rows.append((f"`{name}`", f"{second:.3f}", f"`{plain}`", f"{first:.3f}", ratio, tokens))
    return text.table(("Step", "s", "beside", "s", "Ratio", "tokens/s beside"), rows)


def in_a_sentence(records: Sequence[Record]) -> str:
    """Exact codecs in both directions beside plain FCDP and HSDP."""
    large, *_ = _by_model(records)
    coded, plain = _of(large, "fcdp gather delta reduce exact"), _of(large, "fcdp")
    over_plain, over_hsdp = (
        text.compared(Comparison(coded, over)) for over in (plain, _of(large, "fsdp2-hsdp"))
    )
    sent = [text.megabytes(_sent(record)) for record in (coded, plain)]
    link = format_link(coded.cell.inter_bandwidth_bits_per_s)
    return (
        f"Fine-tuned in full and in bf16 at {link} with k = {coded.cell.accumulation}, a model "
        f"trains {over_plain} as fast as with FCDP alone\nand {over_hsdp} as with HSDP where "
        f"gathers and reductions are coded exactly, in\n{sent[0]} MB per "
        f"step instead of {sent[1]}, once Adam's first {coded.cell.warmup_steps} steps are over "
        "([records](../results/delta-slow-link/records.jsonl))."
    )


def _by_model(records: Sequence[Record]) -> list[list[Record]]:
    """Records with a speed, by model, each the slowest first."""
    models = grouped([r for r in records if r.tokens_per_s], lambda r: r.cell.model.name)
    return [sorted(of, key=lambda record: record.tokens_per_s or 0.0) for of in models]


def _of(records: Sequence[Record], subject: str) -> Record:
    return next(record for record in records if record.cell.subject == subject)


def saving(record: Mapping[str, Any]) -> str:
    """Cost of saving on a schedule, by the record of ``scripts.saving_cost``."""
    pairs = zip(record["saved"], record["plain"], strict=True)
    part = 100 * record["steps"] / record["each"]
    more = [part * (saved / plain - 1) for saved, plain in pairs]
    low, high = interval(more)
    return (
        f"A save of {record['bytes'] / 1e6:.0f} MB each hundred steps (*emulated*, {len(more)} "
        f"rounds) cost {median(more):.1f} % ({low:.1f} to {high:.1f}) of their time and held one\n"
        f"up for {1e3 * median(record['held_up']):.0f} ms (`python -m scripts.saving_cost`)."
    )


def on_a_free_link(records: Sequence[Record]) -> str:
    """Steps with the rule for differences beside those without."""
    rows = []
    for cells in grouped(records, lambda record: record.cell.micro_batch):
        of = {record.cell.settings.model_dump()["gather_codec"]: record for record in cells}
        seconds = [text.number(_seconds(of[codec])) for codec in ("none", "delta")]
        faster = text.compared(Comparison(of["delta"], of["none"]))
        rows.append((str(cells[0].cell.micro_batch), *seconds, faster))
    head = ("Micro-batch", "whole, s/step", "`delta`, s/step", "times as fast")
    return text.table(head, rows, words=())


def over_seeds(records: Sequence[Record]) -> str:
    """Held-out losses of each codec of reductions, over seeds, beside those of exact ones."""
    losses: dict[tuple[float, str], list[float]] = {}
    for record in records:
        loss = _held_out(record)
        if loss is not None:
            codec = str(record.cell.settings.model_dump()["reduce_codec"])
            losses.setdefault((record.cell.learning_rate, codec), []).append(loss)
    rows = []
    for (rate, codec), of in losses.items():
        exact = losses[rate, "none"]
        apart = [100 * (coded / plain - 1) for coded, plain in zip(of, exact, strict=True)]
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

"""What records of CO2 say of its rounds, as Markdown for docs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median, stdev

from analysis import text
from baselines.settings import CO2Settings
from experiments.records.record import Record


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
    clips = dict.fromkeys(clip for _, clip in by)
    names = ("no clipping" if clip is None else f"φ = {clip:g}" for clip in clips)
    lines = [f"| Penalty | {' | '.join(names)} |", f"|---|{'--:|' * len(clips)}"]
    for penalty in dict.fromkeys(penalty for penalty, _ in by):
        columns = [_lag(by.get((penalty, clip), {}), beside) for clip in clips]
        lines.append(f"| `{penalty}` | {' | '.join(columns)} |")
    return "\n".join(lines)


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
    lines = [f"| τ | {' | '.join(names)} |", f"|--:|{'--:|' * len(names)}"]
    for interval in sorted({interval for interval, _ in chosen}):
        columns = [_lag(chosen.get((interval, name), {}), beside) for name in names]
        lines.append(f"| {interval} | {' | '.join(columns)} |")
    rates = dict.fromkeys(
        f"{name} {max(of, key=lambda rate: len(of[rate])):g}" for (_, name), of in losses.items()
    )
    return "\n".join([*lines, "", f"Learning rates: {', '.join(rates)}."])


def _name(record: Record) -> str:
    settings, name = record.cell.settings, record.cell.strategy
    unpenalised = isinstance(settings, CO2Settings) and settings.penalty == "none"
    return f"{name}, no penalty" if unpenalised else name


def kept(matrices: Sequence[Sequence[Record]]) -> str:
    """What each strategy keeps of its speed on the slow link; a column per number of workers.

    Behind the median the least and the most of a step or a round; but for the first round, which
    begins with nothing under way, as bytes are read when nothing is.
    """
    workers = [records[0].cell.cluster.nodes for records in matrices]
    lines = [
        f"| Keeps, with workers | {' | '.join(map(str, workers))} |",
        f"|---|{'--:|' * len(workers)}",
    ]
    seconds = [_seconds(records) for records in matrices]
    for name in dict.fromkeys(name for of in seconds for name in of):
        columns = [_share(of.get(name, {})) for of in seconds]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _share(seconds: dict[bool, list[float]]) -> str:
    """The share that the slow link leaves, of seconds by whether the link has no limit."""
    if len(seconds) < 2:
        return text.ABSENT
    free, slow = median(seconds[True]), seconds[False]
    least, most = (f"{100 * free / of(slow[1:] or slow):.2g}" for of in (max, min))
    apart = "" if least == most else f" ({least}–{most})"
    return text.percent(free / median(slow)) + apart


def _seconds(records: Sequence[Record]) -> dict[str, dict[bool, list[float]]]:
    """Seconds per step of each round by strategy, and by whether the link has no limit."""
    found: dict[str, dict[bool, list[float]]] = {}
    for record in records:
        settings, name = record.cell.settings, record.cell.strategy
        if record.measurement is None:
            continue
        if isinstance(settings, CO2Settings):
            name = f"{name}, τ = {settings.interval}"
        free = record.cell.inter_bandwidth_bits_per_s is None
        found.setdefault(name, {})[free] = record.measurement.round_seconds
    return found


def _held_out(record: Record) -> float | None:
    return None if record.measurement is None else record.measurement.held_out_loss


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

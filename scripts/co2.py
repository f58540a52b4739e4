"""What records of CO2 say of its rounds, as Markdown for docs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

from analysis import text
from baselines.settings import CO2Settings
from experiments.records.record import Record


def behind(records: Sequence[Record]) -> str:
    """Held-out loss behind DDP's, seed by seed, of each penalty (rows) and clipping (columns)."""
    losses = {
        record.cell.seed: record.measurement.held_out_loss
        for record in records
        if record.cell.strategy == "ddp" and record.measurement
    }
    by: dict[tuple[str, float | None], list[float]] = {}
    for record in records:
        settings, own = record.cell.settings, record.measurement
        if isinstance(settings, CO2Settings) and own:
            beside = losses[record.cell.seed]
            assert own.held_out_loss is not None
            assert beside is not None
            share = own.held_out_loss / beside - 1
            by.setdefault((settings.penalty, settings.clip), []).append(share)
    clips = dict.fromkeys(clip for _, clip in by)
    names = ("no clipping" if clip is None else f"φ = {clip:g}" for clip in clips)
    lines = [f"| Penalty | {' | '.join(names)} |", f"|---|{'--:|' * len(clips)}"]
    for penalty in dict.fromkeys(penalty for penalty, _ in by):
        columns = [_spread(by[penalty, clip]) for clip in clips]
        lines.append(f"| `{penalty}` | {' | '.join(columns)} |")
    return "\n".join(lines)


def lag(records: Sequence[Record]) -> str:
    """Held-out loss behind DDP's over intervals, each at the learning rate of most seeds."""
    losses: dict[tuple[int, str], dict[float, dict[int, float]]] = {}
    for record in records:
        found, cell = record.measurement, record.cell
        if found is None or found.held_out_loss is None:
            continue
        of = (getattr(cell.settings, "interval", 0), _name(record))
        of_rates = losses.setdefault(of, {}).setdefault(cell.learning_rate, {})
        of_rates[cell.seed] = found.held_out_loss
    chosen = {of: max(rates.values(), key=len) for of, rates in losses.items()}
    beside = chosen.pop((0, "ddp"))
    names = list(dict.fromkeys(name for _, name in chosen))
    lines = [f"| τ | {' | '.join(names)} |", f"|--:|{'--:|' * len(names)}"]
    for interval in sorted({interval for interval, _ in chosen}):
        columns = []
        for name in names:
            own = chosen.get((interval, name))
            shares = [loss / beside[seed] - 1 for seed, loss in (own or {}).items()]
            columns.append(_spread(shares) if own else text.ABSENT)
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
    """What each strategy keeps of its speed on the slow link; a column per number of workers."""
    workers = [records[0].cell.cluster.nodes for records in matrices]
    lines = [
        f"| Keeps, with workers | {' | '.join(map(str, workers))} |",
        f"|---|{'--:|' * len(workers)}",
    ]
    rates = [_rates(records) for records in matrices]
    for name in rates[0]:
        shares = [of[name][False] / of[name][True] for of in rates]
        lines.append(f"| {name} | {' | '.join(map(text.percent, shares))} |")
    return "\n".join(lines)


def _rates(records: Sequence[Record]) -> dict[str, dict[bool, float]]:
    """Tokens per second by strategy, and by whether the link has no limit."""
    found: dict[str, dict[bool, float]] = {}
    for record in records:
        settings = record.cell.settings
        name = record.cell.strategy
        if isinstance(settings, CO2Settings):
            name = f"{name}, τ = {settings.interval}"
        free = record.cell.inter_bandwidth_bits_per_s is None
        found.setdefault(name, {})[free] = record.tokens_per_s or math.nan
    return found


def _spread(shares: Sequence[float]) -> str:
    """Mean and standard deviation in per cent, to a whole one where the seeds are far apart."""
    middle, apart = 100 * mean(shares), 100 * stdev(shares)
    digits = 0 if apart >= 5 else 1
    return f"{middle:.{digits}f} ± {apart:.{digits}f} %"

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

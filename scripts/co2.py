"""What records of CO2 say of its rounds, as Markdown for docs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from analysis import text
from baselines.settings import CO2Settings
from experiments.records.comparison import Comparison, paired
from experiments.records.record import Record
from scripts.tables import noted


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
    rows = [
        (f"`{penalty}`", *(_lag(by.get((penalty, clip), {}), beside) for clip in clips))
        for penalty in dict.fromkeys(penalty for penalty, _ in by)
    ]
    return text.table(("Penalty", *names), rows)


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


def kept(matrices: Sequence[Sequence[Record]]) -> str:
    """Shares of speed that strategies keep on the slow link; a column per number of workers."""
    found: list[dict[str, Comparison]] = []
    for records in matrices:
        free, slow = (
            [r for r in records if (r.cell.inter_bandwidth_bits_per_s is None) is unshaped]
            for unshaped in (True, False)
        )
        pairs = paired(slow, free, lambda record: record.cell.subject)
        found.append({_with_interval(one): Comparison(one, other) for one, other in pairs})
    rows = [
        (name, *(text.share(of[name]) if name in of else text.ABSENT for of in found))
        for name in dict.fromkeys(name for of in found for name in of)
    ]
    workers = (str(of[0].cell.cluster.nodes) for of in matrices)
    shown = text.table(("Keeps, with workers", *workers), rows)
    return shown + noted(speed for of in found for speed in of.values())


def _with_interval(record: Record) -> str:
    settings = record.cell.settings
    interval = f", τ = {settings.interval}" if isinstance(settings, CO2Settings) else ""
    return f"{record.cell.strategy}{interval}"


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

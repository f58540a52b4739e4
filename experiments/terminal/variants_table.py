"""Variants of one strategy: what the cache of each did, and where its step's time went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from baselines.settings import CacheSettings
from experiments.records.comparison import REFERENCES, Comparison, reference, spread
from experiments.records.record import Record

_ABSENT = "–"
_PHASES = {"forward": "fwd.", "backward": "bwd.", "optimizer": "opt."}


@dataclass(frozen=True)
class Fitted:
    """A table without the columns that a terminal has no room for: no number is cut."""

    table: Table
    #: Indices of the columns that are dropped, one after the other.
    losing: Sequence[int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, columns = copy(self.table), [*self.table.columns]
        wide = options.update(max_width=1000)
        for at in self.losing:
            if Measurement.get(console, wide, shown).maximum <= options.max_width:
                break
            columns.remove(self.table.columns[at])
            # Rich pads a column by its place.
            shown.columns = [replace(column, _index=place) for place, column in enumerate(columns)]
        yield shown


def table(comparison: Sequence[Record]) -> Fitted | None:
    """The variants of one comparison, ranked; ``None`` where fewer than two have a cache."""
    variants = ranked(comparison)
    if sum(getattr(each.of.measurement, "cache", None) is not None for each in variants) < 2:
        return None
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    rows = [row(variant) for variant in variants]
    for title in rows[0]:
        if any(values[title] != _ABSENT for values in rows):
            words = title == "variant"
            grid.add_column(title, justify="left" if words else "right", no_wrap=not words)
    for values in rows:
        shown = [str(column.header) for column in grid.columns]
        grid.add_row(*(Text(values[title]) for title in shown))
    return Fitted(grid, range(len(grid.columns) - 1, 0, -1))


def row(variant: Variant) -> Mapping[str, str]:
    """One variant's figures by the titles of their columns; MB are 10⁶ bytes."""
    return dict(_figures(variant))


def _figures(variant: Variant) -> Iterator[tuple[str, str]]:
    measured, seconds = variant.of.measurement, variant.of.step_seconds_median
    middle = spread(variant.of)
    assert measured is not None, "what is ranked has run"
    assert middle is not None
    assert seconds is not None
    yield "variant", variant.name
    yield "s/step", _number(seconds, 3)
    # Half of the interquartile range over the median.
    yield "±", f"{(middle[1] - middle[0]) / 2 / seconds:.0%}"
    over = _ABSENT if variant.over is None else REFERENCES[variant.over.cell.subject]
    yield f"vs\n{over}", speed_up(variant)
    cache = measured.cache
    yield "hits", _number(cache.hits_per_step if cache else None, 4)
    yield "misses", _number(cache.misses_per_step if cache else None, 4)
    for tier in ("device", "host", "disk"):
        held = _ABSENT
        if cache is not None and tier in cache.entries:
            held = f"{_number(cache.entries[tier], 2)}: {_megabytes(cache.entry_bytes[tier])}"
        yield f"{tier}\nn: MB", held
    # Memory of the host, page-locked on CUDA; of the device, its tier's.
    yield "host\narena MB", _megabytes(cache.host_bytes if cache else None)
    yield "sent\nMB", _megabytes(measured.inter_node_bytes_per_step)
    # Seconds per step, the mean over steps, and bytes that a node sends to others then.
    phases, ledger = measured.phase_seconds or {}, measured.ledger_bytes_per_step
    for phase, short in _PHASES.items():
        yield f"{short}\ns", _number(phases.get(phase), 3)
    link = None if ledger is None else ledger.get("inter_node", {})
    for phase, parts in (("forward", ["forward"]), ("backward", ["backward", "reduce"])):
        took, bits = phases.get(phase), None
        if link is not None and took:
            bits = 8 * sum(link.get(part, 0.0) for part in parts) / took
        yield f"{_PHASES[phase]}\nMbit/s", _megabytes(bits)
    yield "MFU", _ABSENT if variant.mfu is None else f"{variant.mfu:.1%}"


def speed_up(speed: Comparison) -> str:
    """How many times as fast a cell is; "not sig." where noise may be all of it."""
    if speed.ratio is None:
        return _ABSENT
    if speed.of is not speed.over and not speed.differs:
        return "not sig."
    return f"{speed.ratio:.2f}×"


def _megabytes(count: float | None) -> str:
    return _ABSENT if count is None else _number(count / 1e6, 3)


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return _ABSENT
    if value == round(value) or value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"


class Variant(Comparison):
    """One cell that ran, beside the reference of its comparison."""

    @property
    def name(self) -> str:
        """FCDP's policy and other choices; of another strategy its name and choices."""
        cell = self.of.cell
        if cell.strategy != "fcdp" or not isinstance(cell.settings, CacheSettings):
            return cell.subject
        policy = cell.settings.policy
        return " ".join((policy, *(choice for choice in cell.choices if choice != policy)))

    @property
    def mfu(self) -> float | None:
        """Model FLOPS utilisation, where a peak is known: in simulations, and on known GPUs."""
        measured = self.of.measurement
        if measured and measured.simulation:
            return measured.simulation.mfu
        from experiments.records.modelled import measured_mfu  # its numpy takes a while

        return measured_mfu(self.of)


def ranked(comparison: Sequence[Record]) -> list[Variant]:
    """The cells of one comparison that ran to their end, the fastest first."""
    ran = [record for record in comparison if record.measurement is not None]
    ran.sort(key=lambda record: -(record.tokens_per_s or 0.0))
    return [Variant(record, reference(comparison)) for record in ran]

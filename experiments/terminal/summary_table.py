"""The table at the end of a run: each strategy next to a reference, such as ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.comparison import REFERENCES, Comparison, few, groups, reference
from experiments.records.record import METRICS, Record, State
from experiments.records.settings import Described, described
from experiments.terminal import variants_table
from simulation.quantities import format_link

STATE_STYLES = {
    "ok": "green",
    "oom": "magenta",
    "failed": "bold red",
    "timeout": "yellow",
    "skipped": "dim",
}
#: Most cells that are named of those that failed alike.
_LISTED = 3
_ABSENT = Text("–", style="dim")
#: Meaning of a minimum above what was sent.
_LESS = (
    "\n* the minimum is of a schedule that gathers each block anew in backward; DeepSpeed still "
    "holds some from the end of forward, which it does not gather again"
)


def summary(records: Sequence[Record]) -> RenderableType:
    """Cells by model, tuning and link; below them what did not run to its end, and why."""
    ran = [record for record in records if record.state != "skipped"]
    if not ran:
        return Group(*_notes(records, []))
    extra = varying_settings([record.cell for record in ran])
    # The first column fits every strategy, so that the tables line up under one header.
    longest = max(len(record.cell.subject) for record in ran)
    usual = reference(ran)
    wanted = None if usual is None else usual.cell.subject
    columns = _columns(ran, wanted)
    compared: list[Comparison] = []
    grouped = [(group, _Group.of(group, wanted)) for group in groups(ran)]
    columns = [column.wide_enough(grouped) for column in columns]
    titles = [Text("strategy"), *(Text(column.title) for column in columns)]
    measures = [Text(), *(Text(column.measure) for column in columns)]
    parts = [_grid(longest, columns, [titles, measures], "dim")]
    for group, comparison in grouped:
        compared += [comparison.speed(of) for of in group if of is not comparison.baseline]
        rows = [[_strategy(of), *(each.show(of, comparison) for each in columns)] for of in group]
        parts += [_heading(group, extra, comparison), _grid(longest, columns, rows)]
        if (details := variants_table.table(group)) is not None:
            parts += [Text(), details]
    if any(map(_sends_less, ran)):
        parts.append(Text(_LESS, style="dim"))
    return Group(*parts, *_notes(records, compared))


def varying_settings(cells: Sequence[Cell]) -> list[Described]:
    """Settings beyond those always shown in which these cells are different comparisons."""
    conditions = (described(Cell)[name] for name in settings.names(Cell, "condition"))
    return [
        item
        for item in conditions
        if not item.setting.always and len({item.of(cell) for cell in cells}) > 1
    ]


def _strategy(record: Record) -> Text:
    return Text(record.cell.subject, style="bold" if record.cell.strategy == "fcdp" else "")


@dataclass(frozen=True)
class _Group:
    """The baseline and the step that the figures of one group refer to."""

    #: Record that the others are compared with in the same settings, if it is there.
    baseline: Record | None
    #: The last step that every cell with losses has trained; 0 if there are none.
    step: int
    #: Whether some cell went on after it.
    is_cut: bool

    @classmethod
    def of(cls, group: Sequence[Record], wanted: str | None) -> _Group:
        found = reference(group, wanted)
        baseline = found if found and found.cell.subject == wanted else None
        steps = {len(r.measurement.losses) for r in group if r.measurement} - {0}
        return cls(baseline, min(steps, default=0), len(steps) > 1)

    def speed(self, record: Record) -> Comparison:
        return Comparison(record, self.baseline)


@dataclass(frozen=True)
class _Column:
    title: str
    measure: str
    justify: JustifyMethod
    show: Callable[[Record, _Group], Text]
    #: The more, the sooner a narrow terminal has none of it.
    spare: int = 0
    width: int = 0

    def wide_enough(self, grouped: Iterable[tuple[Sequence[Record], _Group]]) -> _Column:
        """The column, with room for each of its cells."""
        shown = [self.show(record, of).cell_len for group, of in grouped for record in group]
        return replace(self, width=max(len(self.title), len(self.measure), *shown))


def _tokens(record: Record, _: _Group) -> Text:
    speed = record.tokens_per_s
    if speed is None:
        return _ABSENT
    return Text(f"{speed:,.1f}" if speed < 100 else f"{speed:,.0f}")


def _speed_up(record: Record, comparison: _Group) -> Text:
    speed = comparison.speed(record)
    told, ratio = variants_table.speed_up(speed), speed.ratio or 1.0
    if not told.endswith("×"):
        return Text(told, style="dim")
    return Text(told, style="green" if ratio > 1 else "red" if ratio < 1 else "")


def _sent(record: Record, _: _Group) -> Text:
    measured = record.measurement
    return _megabytes(measured.inter_node_bytes_per_step if measured else None)


def _sent_ratio(record: Record, comparison: _Group) -> Text:
    baseline = comparison.baseline
    if record.measurement is None or baseline is None or baseline.measurement is None:
        return _ABSENT
    other = baseline.measurement.inter_node_bytes_per_step
    return (
        Text(f"{record.measurement.inter_node_bytes_per_step / other:.2f}×") if other else _ABSENT
    )


def _least(record: Record, _: _Group) -> Text:
    measured = record.measurement
    least = _megabytes(measured.inter_node_bytes_closed_form if measured else None)
    return least + "*" if _sends_less(record) else least


def _sends_less(record: Record) -> bool:
    """Whether DeepSpeed sends less than its schedule must, by more than rounding."""
    measured = record.measurement
    if measured is None or measured.engine != "deepspeed":
        return False
    if measured.inter_node_bytes_closed_form is None:
        return False
    return measured.inter_node_bytes_per_step < 0.995 * measured.inter_node_bytes_closed_form


def _loss(record: Record, comparison: _Group) -> Text:
    if record.measurement is None or not record.measurement.losses:
        return _ABSENT
    return Text(f"{record.measurement.losses[comparison.step - 1]:.4f}")


def _step(record: Record, _: _Group) -> Text:
    seconds = record.step_seconds_median
    return _ABSENT if seconds is None else Text(f"{seconds:.{2 if seconds >= 100 else 3}f}")


def _megabytes(count: float | None) -> Text:
    return _ABSENT if count is None else Text(megabytes(count))


def megabytes(count: float) -> str:
    """Bytes in 10⁶, no more than seven characters below a terabyte."""
    return f"{count / 1e6:.2f}" if count < 1e9 else f"{count / 1e6:,.0f}"


#: Stands for what the cells are compared with.
_VERSUS = "vs"
_COLUMNS = (
    _Column("state", "", "left", lambda of, _: Text(of.state, style=STATE_STYLES[of.state])),
    _Column("speed", "tokens/s", "right", _tokens),
    _Column("speed-up", _VERSUS, "right", _speed_up),
    _Column("sent", "MB/step", "right", _sent),
    _Column("sent", _VERSUS, "right", _sent_ratio, spare=2),
    _Column("minimum", "MB/step", "right", _least, spare=3),
    _Column("loss", "", "right", _loss, spare=1),
    _Column("step", "s", "right", _step),
)


def _columns(records: Sequence[Record], wanted: str | None) -> list[_Column]:
    """Columns of all tables, and of metrics where a record has one."""
    metrics = [
        _metric(name, *metric.brief)
        for name, metric in METRICS.items()
        if metric.brief and any(getattr(of.measurement, name, None) is not None for of in records)
    ]
    versus = "" if wanted is None else f"vs {REFERENCES[wanted]}"
    named = [
        replace(column, measure=versus) if column.measure == _VERSUS else column
        for column in _COLUMNS
    ]
    return [*named[:-1], *metrics, named[-1]]


def _metric(name: str, title: str, measure: str) -> _Column:
    def show(record: Record, _: _Group) -> Text:
        value, metric = getattr(record.measurement, name, None), METRICS[name]
        return _ABSENT if value is None else Text(metric.written(value).removesuffix(metric.unit))

    return _Column(title, measure, "right", show, spare=4)


def _grid(
    longest: int, columns: Sequence[_Column], rows: Iterable[Sequence[Text]], style: str = ""
) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    for column in columns:
        table.add_column(justify=column.justify, width=column.width, no_wrap=True)
    for name, *figures in rows:
        name.pad_right(longest - name.cell_len)
        table.add_row(name, *figures, style=style)
    spare = [at for at, column in enumerate(columns, 1) if column.spare]
    return variants_table.Fitted(table, sorted(spare, key=lambda at: -columns[at - 1].spare))


def _heading(group: Sequence[Record], extra: Sequence[Described], comparison: _Group) -> Text:
    cells = [record.cell for record in group]
    first = cells[0]
    parts = [first.model.name, first.tuning, format_link(first.inter_bandwidth_bits_per_s)]
    for item in extra:
        label, own = item.setting.label.lower(), {item.of(cell) for cell in cells}
        parts.append(
            f"{label} {item.written(own.pop())}" if len(own) == 1 else f"each at its own {label}"
        )
    if comparison.is_cut:
        # Losses of different steps would look like different results.
        parts.append(f"loss of step {comparison.step}")
    parts.append(" and ".join(sorted({record.evidence for record in group})))
    return Text("\n" + " · ".join(parts), style="bold cyan")


def _notes(records: Sequence[Record], compared: Sequence[Comparison]) -> list[RenderableType]:
    """Notes on what did not run to its end, one for all cells that ended alike."""
    alike: dict[tuple[State, str], list[str]] = {}
    for record in records:
        if record.state != "ok":
            lines = (record.error or "").strip().splitlines() or [""]
            # The last line of a traceback is the one that names the error.
            alike.setdefault((record.state, lines[-1]), []).append(record.cell_id)
    notes: list[RenderableType] = []
    machines = [r.machine for r in records if r.machine is not None and r.machine.why_busy]
    if machines:
        worst = max(machines, key=lambda machine: machine.steal_share)
        notes.append(Text(f"\nthe machine was busy: {worst.why_busy}", style="yellow"))
    if said := few(compared):
        notes.append(Text(f"\n{said}", style="dim"))
    for (state, error), ids in alike.items():
        count = f" {len(ids)} cell{'s' if len(ids) > 1 else ''}: "
        notes.append(Text.assemble("\n", (state, STATE_STYLES[state]), count, error))
        if state != "skipped":
            more = [f"and {len(ids) - _LISTED} more"] if len(ids) > _LISTED else []
            for line in [*ids[:_LISTED], *more]:
                notes.append(Text(f"  {line}", style="dim", no_wrap=True))
    return notes

"""The table at the end of a run: each strategy next to a reference, such as ZeRO-3."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.comparison import REFERENCES, Comparison, few, groups, reference
from experiments.records.record import METRICS, Record, State
from experiments.terminal import variants_table
from simulation.quantities import format_link

STATE_STYLES = {
    "ok": "green",
    "oom": "magenta",
    "failed": "bold red",
    "timeout": "yellow",
    "skipped": "dim",
}
#: The two lines above a column: what it shows, and its unit or what it is compared with.
_Title = tuple[str, str]
_Row = dict[_Title, Text]
#: Most cells that are named of those that failed alike.
_LISTED = 3
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
    usual = reference(ran)
    subject = None if usual is None else usual.cell.subject
    versus = "" if subject is None else f"vs {REFERENCES[subject]}"
    metrics: dict[_Title, str] = {
        metric.brief: name
        for name, metric in METRICS.items()
        if metric.brief and any(getattr(of.measurement, name, None) is not None for of in ran)
    }
    compared: list[Comparison] = []
    tables: list[tuple[list[Record], list[_Row], Text]] = []
    for group in groups(ran):
        candidate = reference(group, subject)
        baseline = candidate if candidate and candidate.cell.subject == subject else None
        compared += [Comparison(of, baseline) for of in group if of is not baseline]
        steps = {len(r.measurement.losses) for r in group if r.measurement} - {0}
        last = min(steps, default=0)  # that every cell with losses has trained
        rows = [dict(_figures(Comparison(of, baseline), last, versus, metrics)) for of in group]
        tables.append((group, rows, _heading(group, extra, last if len(steps) > 1 else None)))
    widths = _widths([row for _, rows, _ in tables for row in rows])
    # A narrow terminal lacks these, the first of them sooner than the others.
    spare = (*metrics, ("minimum", "MB/step"), ("sent", versus), ("loss", ""))
    losing = [[*widths].index(title) for title in spare]
    parts = [_grid(widths, losing, ([Text(of[line]) for of in widths] for line in (0, 1)), "dim")]
    for group, rows, heading in tables:
        parts += [heading, _grid(widths, losing, ([*row.values()] for row in rows))]
        if (details := variants_table.table(group)) is not None:
            parts += [Text(), details]
    if any(map(_sends_less, ran)):
        parts.append(Text(_LESS, style="dim"))
    return Group(*parts, *_notes(records, compared))


def _widths(rows: Sequence[_Row]) -> dict[_Title, int]:
    """Widths of columns in which all rows line up under one header."""
    return {
        title: max(*map(len, title), *(row[title].cell_len for row in rows)) for title in rows[0]
    }


def varying_settings(cells: Sequence[Cell]) -> list[settings.Described]:
    """Settings beyond those always shown in which these cells are different comparisons."""
    conditions = (settings.described(Cell)[name] for name in settings.names(Cell, "condition"))
    return [
        item
        for item in conditions
        if not item.setting.always and len({item.of(cell) for cell in cells}) > 1
    ]


def _figures(
    speed: Comparison, last: int, versus: str, metrics: Mapping[_Title, str]
) -> Iterator[tuple[_Title, Text]]:
    """One cell's figures, beside those that it is compared with; the loss is that of one step."""
    record, measured = speed.of, speed.of.measurement
    over = speed.over.measurement if speed.over else None
    sent = measured.inter_node_bytes_per_step if measured else None
    others = over.inter_node_bytes_per_step if over else None
    bold = "bold" if record.cell.strategy == "fcdp" else ""
    yield ("strategy", ""), Text(record.cell.subject, style=bold)
    yield ("state", ""), Text(record.state, style=STATE_STYLES[record.state])
    tokens = record.tokens_per_s
    yield ("speed", "tokens/s"), _text(tokens, "{:,.1f}" if (tokens or 0) < 100 else "{:,.0f}")
    speed_up, ratio = variants_table.speed_up(speed), speed.ratio or 1.0
    changed = "green" if ratio > 1 else "red" if ratio < 1 else ""
    yield ("speed-up", versus), Text(speed_up, style=changed if speed_up.endswith("×") else "dim")
    yield ("sent", "MB/step"), _megabytes(sent)
    share = sent / others if sent is not None and others else None
    yield ("sent", versus), _text(share, "{:.2f}×")
    least = _megabytes(measured.inter_node_bytes_closed_form if measured else None)
    yield ("minimum", "MB/step"), least + "*" if _sends_less(record) else least
    losses = measured.losses if measured else []
    yield ("loss", ""), _text(losses[last - 1] if losses else None, "{:.4f}")
    for title, name in metrics.items():
        value, metric = getattr(measured, name, None), METRICS[name]
        written = None if value is None else metric.written(value).removesuffix(metric.unit)
        yield title, _text(written, "{}")
    seconds = record.step_seconds_median
    yield ("step", "s"), _text(seconds, "{:.2f}" if (seconds or 0) >= 100 else "{:.3f}")


def _text(value: float | str | None, form: str) -> Text:
    return Text("–", style="dim") if value is None else Text(form.format(value))


def _megabytes(count: float | None) -> Text:
    return _text(None if count is None else megabytes(count), "{}")


def megabytes(count: float) -> str:
    """Bytes in 10⁶, no more than seven characters below a terabyte."""
    return f"{count / 1e6:.2f}" if count < 1e9 else f"{count / 1e6:,.0f}"


def _sends_less(record: Record) -> bool:
    """Whether DeepSpeed sends less than its schedule must, by more than rounding."""
    measured = record.measurement
    if measured is None or measured.engine != "deepspeed":
        return False
    least = measured.inter_node_bytes_closed_form
    return least is not None and measured.inter_node_bytes_per_step < 0.995 * least


def _grid(
    columns: Mapping[_Title, int],
    losing: Sequence[int],
    rows: Iterable[Sequence[Text]],
    style: str = "",
) -> RenderableType:
    (longest, *others), table = columns.values(), Table.grid(padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    for at, width in enumerate(others):
        table.add_column(justify="right" if at else "left", width=width, no_wrap=True)
    for name, *figures in rows:
        name.pad_right(longest - name.cell_len)
        table.add_row(name, *figures, style=style)
    return variants_table.Fitted(table, losing)


def _heading(group: Sequence[Record], extra: Sequence[settings.Described], cut: int | None) -> Text:
    cells = [record.cell for record in group]
    first = cells[0]
    parts = [first.model.name, first.tuning, format_link(first.inter_bandwidth_bits_per_s)]
    for item in extra:
        label, values = item.setting.label.lower(), {item.of(cell) for cell in cells}
        parts.append(
            f"each at its own {label}" if len(values) > 1 else f"{label} {item.written(*values)}"
        )
    if cut is not None:
        # Losses of different steps would look like different results.
        parts.append(f"loss of step {cut}")
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
    if warning := few(compared):
        notes.append(Text(f"\n{warning}", style="dim"))
    for (state, error), ids in alike.items():
        count = f" {len(ids)} cell{'s' if len(ids) > 1 else ''}: "
        notes.append(Text.assemble("\n", (state, STATE_STYLES[state]), count, error))
        if state != "skipped":
            more = [f"and {len(ids) - _LISTED} more"] if len(ids) > _LISTED else []
            for line in [*ids[:_LISTED], *more]:
                notes.append(Text(f"  {line}", style="dim", no_wrap=True))
    return notes

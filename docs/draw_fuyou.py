"""Draws docs/figures/fuyou-published.svg and fuyou-measured.svg: Fuyou modelled, and here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures.drawings import canvas
from analysis.load import fuyou
from analysis.load.fuyou import Point
from analysis.load.table import latest, load
from experiments.records.record import Record

ROOT = Path(__file__).resolve().parent.parent
FORMS = ("after", "overlapped", "delayed", "delayed, swaps")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_MARKERS = "osD^"


def records(matrix: str) -> list[Record]:
    """Cells of a committed matrix that were measured."""
    loaded = latest(load(ROOT / "results" / matrix / "records.jsonl"))
    return [record for record in loaded if record.measurement is not None]


def published() -> Figure:
    """Teraflops over SSDs and over the batch: lines are modelled, markers are published."""
    points = fuyou.published()
    rate = fuyou.fitted([point for point in points if point.gpus == 1])
    with canvas(8.4, 3.2, 1, 2) as (figure, ((ssds, batches),)):
        for at, batch in enumerate((32, 48, 64)):
            group = [p for p in points if p.table == "ssds" and p.batch == batch]
            _beside(ssds, group, [p.ssds for p in group], f"batch {batch}", at, rate)
        ssds.set(xlabel="SSDs (13B, one GPU)", ylabel="TFLOPS")
        series = {(p.model, p.gpus): None for p in points if p.table != "ssds"}
        for at, (model, gpus) in enumerate(series):
            group = [p for p in points if p.table != "ssds" and (p.model, p.gpus) == (model, gpus)]
            label = f"{model}, {gpus} GPU{'s' * (gpus > 1)}"
            _beside(batches, group, [p.batch for p in group], label, at, rate)
        batches.set_xscale("log", base=2)
        batches.set(xlabel="global batch (12 SSDs)", ylabel="TFLOPS")
        for ax in (ssds, batches):
            ax.plot([], [], "o", color="0.4", markersize=4, label="published")
            ax.legend(fontsize=7)
            ax.set_ylim(bottom=0)
    return figure


def _beside(
    ax: Axes, points: Sequence[Point], xs: Sequence[int], label: str, at: int, rate: float
) -> None:
    colour = (*_COLOURS, "#E69F00", "#56B4E9")[at]
    modelled = [fuyou.predicted(point, rate) for point in points]
    ax.plot(xs, modelled, color=colour, label=f"{label}, modelled")
    ax.plot(xs, [p.tflops for p in points], "o", color=colour, markersize=4)


def form(record: Record) -> str:
    """Form of the cell: when its optimizer steps, and whether its model chooses what to swap."""
    settings: Any = record.cell.settings
    return settings.update + (", swaps" if settings.swap == "auto" else "")


def measured() -> Figure:
    """Seconds per step by the speed of the SSD, and by what is swapped."""
    with canvas(8.4, 3.2, 1, 2) as (figure, ((speeds, amounts),)):
        cells = records("fuyou")
        for name, colour, marker in zip(FORMS, _COLOURS, _MARKERS, strict=True):
            cells_of_form = [record for record in cells if form(record) == name]
            xs = [_settings(record).ssd_limit / 1e6 for record in cells_of_form]
            ys = [record.step_seconds_median for record in cells_of_form]
            speeds.plot(xs, ys, color=colour, marker=marker, label=name)
        speeds.set(xlabel="SSD, MB/s each way", ylabel="s per step")
        speeds.legend(fontsize=7)
        swapped = sorted(records("fuyou-swap"), key=chosen)
        fixed = [record for record in swapped if swap(record) != "auto"]
        best = [record for record in swapped if swap(record) == "auto"]
        for group, look in ((fixed, "o-"), (best, "r*")):
            amounts.plot(
                [chosen(record) / 2**20 for record in group],
                [record.step_seconds_median for record in group],
                look,
                label="chosen by the model" if group is best else "given",
                markersize=5 if group is fixed else 12,
            )
        amounts.set(xlabel="swapped, MiB per step", ylabel="s per step")
        amounts.legend(fontsize=7)
        for ax in (speeds, amounts):
            ax.set_ylim(bottom=0)
    return figure


def swap(record: Record) -> str:
    """Swap of the cell, as its matrix says it."""
    return str(_settings(record).swap)


def _settings(record: Record) -> Any:
    return record.cell.settings


def chosen(record: Record) -> float:
    """Bytes of products that the cell keeps."""
    assert record.measurement is not None
    assert record.measurement.chosen_bytes is not None
    return record.measurement.chosen_bytes


def figures() -> dict[str, Figure]:
    """The figures by the names of their files."""
    return {"fuyou-published": published(), "fuyou-measured": measured()}

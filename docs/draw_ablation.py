"""Draws docs/figures/ablation.svg: tokens per second of each variant of the committed ablation."""

from pathlib import Path

from matplotlib.figure import Figure

from analysis import strategies
from analysis.compare.baseline import compare
from analysis.figures import axes
from analysis.figures.drawings import canvas, label_width, put_source
from analysis.load.table import latest, load

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "ablation" / "records.jsonl"


def draw() -> Figure:
    """A panel for each number of micro-batches, variants as bars, rounds' middle half as lines."""
    compared = compare(latest(load(RECORDS)))
    looks = strategies.styles(compared["strategy"])
    panels = list(compared.groupby("accumulation"))
    with canvas(7.4 + label_width(looks), 3.0, 1, len(panels), sharey=True) as (figure, (grid,)):
        for (count, cells), ax in zip(panels, grid, strict=True):
            axes.draw_throughput_of_one_link(ax, cells, looks)
            plural = "" if count == 1 else "es"
            ax.set(title=f"{count} micro-batch{plural} per step", xlabel="tokens/s")
        put_source(figure, compared, "")
    return figure

"""What the simulator predicts next to what was run: the same cells, joined by their ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis import strategies, text
from analysis.drawings import Drawing, style
from baselines.schedule import DEEPSPEED
from experiments import framing
from experiments.records import Record

#: What the predictions know of the records that they are compared with.
FITTED = (
    "The simulator's constants of this host are fitted to cells whose links are unshaped. Of "
    "limited links it knows the limit, and how far DeepSpeed gathers ahead, which is fitted to the "
    "bytes of such cells too."
)
#: How near the figure's band is, as a share.
_BAND = 0.1
#: What counted bytes may be more than those predicted, in words.
FRAMING = (
    f"headers and acknowledgements: {100 * framing.SHARE:g} % and {framing.MESSAGE_BYTES} bytes a "
    f"message; of DeepSpeed's, {100 * DEEPSPEED.estimated_share:g} % more"
)
_LINKS = {True: "limited", False: "unshaped"}
#: One each for what is predicted, and what the constants of the simulator were fitted to.
_MARKERS = {"limited": "o", "unshaped": "s"}


@dataclass(frozen=True)
class Row:
    """How near the predictions of one matrix are, its links limited or not."""

    matrix: str
    link: str
    cells: int
    median_error: str
    largest_error: str
    #: Cells whose bytes between nodes are the predicted ones, within framing.
    bytes_agree: int
    #: Counted over predicted bytes by tuning: the median, and the cell that is farthest off.
    counted_full: str
    counted_lora: str


def joined(
    matrix: str, records: Sequence[Record], predictions: Sequence[Record]
) -> list[dict[str, object]]:
    """Each cell that ran and was predicted: its settings, seconds of both, bytes."""
    by_id = {prediction.cell_id: prediction for prediction in predictions}
    found: list[dict[str, object]] = []
    for record in records:
        prediction = by_id.get(record.cell_id)
        if record.measurement is None or prediction is None or prediction.measurement is None:
            continue
        counted = record.measurement.inter_node_bytes_per_step
        expected = prediction.measurement.inter_node_bytes_per_step
        found.append(
            {
                "matrix": matrix,
                "tuning": record.cell.tuning,
                "engine": strategies.engine(record.cell.strategy),
                "link": _LINKS[record.cell.inter_bandwidth_bits_per_s is not None],
                "timed": record.step_seconds_median,
                "predicted": prediction.step_seconds_median,
                "bytes_agree": framing.agree(record.cell, expected, counted),
                "counted_share": counted / expected if expected else math.nan,
            }
        )
    return found


def rows(pairs: pd.DataFrame) -> list[Row]:
    """One for each matrix and kind of link."""
    found = []
    for (matrix, link), cells in pairs.groupby(["matrix", "link"], sort=True):
        errors = _errors(cells)
        shares = {tuning: _shares(of["counted_share"]) for tuning, of in cells.groupby("tuning")}
        largest = max(errors, key=abs)
        found.append(
            Row(
                matrix=str(matrix),
                link=str(link),
                cells=len(cells),
                median_error=text.percent(median_error(cells)),
                largest_error=f"{100 * largest:+.0f} %",
                bytes_agree=int(cells["bytes_agree"].sum()),
                counted_full=shares.get("full", text.ABSENT),
                counted_lora=shares.get("lora", text.ABSENT),
            )
        )
    return found


def median_error(cells: pd.DataFrame) -> float:
    """Median of the absolute errors of the steps' times, as a share; there must be a cell."""
    return median(abs(error) for error in _errors(cells))


def draw(pairs: pd.DataFrame) -> Drawing:
    """Predicted against timed seconds a step, both on logarithmic axes."""
    looks = {
        "DeepSpeed": strategies.BASELINE,
        "PyTorch": "fsdp2",
        "This engine": strategies.SUBJECT,
    }
    styles = strategies.styles(looks.values())
    ends = [pairs[["timed", "predicted"]].min().min() / 1.5]
    ends.append(pairs[["timed", "predicted"]].max().max() * 1.5)
    with style():
        figure = Figure(figsize=(4.6, 4.2), layout="constrained")
        ax = figure.subplots()
        line = np.array(ends)
        ax.fill_between(line, line * (1 - _BAND), line * (1 + _BAND), color="#E6E6E6", linewidth=0)
        ax.plot(line, line, color="#888888", linewidth=0.8)
        sns.scatterplot(
            pairs,
            x="timed",
            y="predicted",
            hue="engine",
            palette={engine: styles[name].colour for engine, name in looks.items()},
            hue_order=[engine for engine in looks if engine in set(pairs["engine"])],
            style="link",
            markers=_MARKERS,
            alpha=0.8,
            s=26,
            ax=ax,
        )
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ax.set(xlabel="s/step, emulated (timed)", ylabel="s/step, simulated (predicted)")
        ax.legend(frameon=False)
    return Drawing("validation", "Simulated against emulated steps", _caption(pairs), figure)


def _caption(pairs: pd.DataFrame) -> str:
    parts = [
        f"{link} links: {text.percent(median_error(cells))} median absolute error of "
        f"{len(cells)} cells"
        for link, cells in pairs.groupby("link")
    ]
    return (
        f"Seconds a step of each cell, predicted against timed; {'; '.join(parts)}. The band is "
        f"±{100 * _BAND:g} %. {FITTED}"
    )


def _shares(counted: pd.Series[float]) -> str:
    """The median, and the share that is farthest from 1."""
    farthest = max(counted, key=lambda share: abs(share - 1))
    return f"{counted.median():.3f}, {farthest:.2f}"


def _errors(cells: pd.DataFrame) -> list[float]:
    """Relative; above 0 where the prediction is too slow."""
    return list(cells["predicted"] / cells["timed"] - 1)

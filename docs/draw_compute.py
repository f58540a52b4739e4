"""Draws docs/figures/compute.svg: predicted over measured tokens per second of published runs."""

from matplotlib.figure import Figure

from analysis.figures.drawings import canvas
from simulation import compute
from simulation.compute import Predicted

#: Okabe and Ito's colours, and a marker each.
_LOOKS = {
    "a100-40gb": ("#0072B2", "o"),
    "a100-80gb": ("#E69F00", "s"),
    "h100-sxm": ("#009E73", "^"),
    "h100-96gb": ("#CC79A7", "v"),
    "rtx4090": ("#D55E00", "D"),
}
#: The figure's limits; a run outside of them is drawn at the edge.
_LEAST, _MOST = 0.8, 1.3


def draw() -> Figure:
    """Two panels by parameters: rows that the fit has seen, and rows of sources that it has not."""
    record = compute.read()
    with canvas(7.4, 3.0, 1, 2, sharey=True) as (figure, (grid,)):
        for ax, held_out in zip(grid, (False, True), strict=True):
            for gpu, (colour, marker) in _LOOKS.items():
                rows = [p for p in record.predictions if p.row.gpu == gpu]
                ax.scatter(
                    [_parameters(prediction) for prediction in rows],
                    [_ratio(prediction, held_out=held_out) for prediction in rows],
                    s=12,
                    color=colour,
                    marker=marker,
                    facecolors=colour if held_out else "none",
                    label=gpu,
                    linewidths=0.8,
                    clip_on=False,  # those at the edge are whole
                )
            ax.axhline(1, color="0.6", linewidth=0.8, zorder=0)
            check = record.check(compute.SOURCES if held_out else "all rows, fitted")
            ax.set(
                title=f"{'held out' if held_out else 'fitted'}: median error {check.median:.1%}, "
                f"nine of ten within {check.nine_of_ten:.1%}",
                xscale="log",
                xlabel="parameters in blocks",
                ylim=(_LEAST, _MOST),
            )
        figure.axes[0].set_ylabel("predicted / measured tokens/s")
        names = figure.axes[1].get_legend_handles_labels()
        figure.legend(*names, loc="outside lower center", ncols=len(_LOOKS), frameon=False)
    return figure


def _parameters(prediction: Predicted) -> float:
    model = prediction.row.shape()
    return 1.0 * model.layers * model.block_parameters


def _ratio(prediction: Predicted, *, held_out: bool) -> float:
    predicted = prediction.held_out if held_out else prediction.fitted
    return min(max(predicted / prediction.row.tokens_per_s_per_gpu, _LEAST), _MOST)

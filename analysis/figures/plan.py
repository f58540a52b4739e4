"""The picture of a plan: throughput and cost over nodes and links, each with its range."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from analysis.figures.axes import SOFT, tick_throughput
from analysis.figures.drawings import canvas
from analysis.strategies import styles

_AXES = {"nodes": "nodes", "gbit_s": "Gbit/s reached per node"}
_SPEEDS = ("tokens_per_s", "low", "high")


def draw(plan: Mapping[str, Any]) -> Figure:
    """Draw the curves of ``experiments plan --figure``; raises ``KeyError`` for another file."""
    curves, price = plan["curves"], plan["price_per_gpu_hour"]
    looks = styles({point["strategy"] for curve in curves.values() for point in curve})
    with canvas(7.4, 4.8, 2, len(_AXES), sharex="col", sharey="row") as (figure, grid):
        for column, (axis, title) in zip(grid.T, _AXES.items(), strict=True):
            for name, look in looks.items():
                points = [point for point in curves[axis] if point["strategy"] == name]
                hours = [plan["tokens"] / 3600 * point["gpus"] * (price or 1) for point in points]
                at = [point[axis] for point in points]
                fast = [[point[key] for point in points] for key in _SPEEDS]
                costs = [[h / v for h, v in zip(hours, of, strict=True)] for of in fast]
                for ax, (drawn, *ends) in zip(column, (fast, costs), strict=True):
                    line = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes}
                    ax.plot(at, drawn, label=look.label, linewidth=1.4, **line)
                    ax.fill_between(at, *ends, color=look.colour, alpha=0.12, linewidth=0)
            for ax in column:
                ax.axvline(plan["at"][axis], color=SOFT, linestyle=":", linewidth=0.9)
                ax.set(xscale="log", yscale="log")
            ticks = sorted({point[axis] for point in curves[axis]})
            column[-1].set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
            column[-1].minorticks_off()
            column[-1].set_xlabel(title)
        for ax, title in zip(
            grid[:, 0], ("tokens/s", "cost" if price else "GPU-hours"), strict=True
        ):
            ax.set_ylabel(title)
            tick_throughput(ax)
        cluster = f"{plan['nodes']} × {plan['ranks_per_node']} {plan['gpu']} (dotted)"
        figure.suptitle(
            f"{plan['model']} on {cluster}, {plan['tokens']:.3g} tokens; {plan['evidence']}, "
            "bands hold nine of ten",
            fontsize=8.5,
        )
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure

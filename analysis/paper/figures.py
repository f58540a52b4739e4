"""Figures of the paper's tables: its points on our curves and bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import strategies
from analysis.claims.computations import Ratio, Value
from analysis.claims.papers import Claim
from analysis.compare.baseline import compare
from analysis.figures import axes, matrix
from analysis.figures.drawings import Drawing, line, put_legend, style
from analysis.load.bound import BoundStudy
from analysis.load.rows import Quantity, Row
from analysis.load.runs import Run
from analysis.paper.sweeps_drawn import COLOURS, DASHES
from simulation.quantities import format_link, link

#: The model that the paper's tables are about, where several were run.
LARGEST = "gpt-30b"
_PAPERS_MARK = {
    "marker": "D", "markerfacecolor": "white", "markeredgecolor": "black", "markeredgewidth": 1.6,
    "markersize": 7, "linestyle": "none", "zorder": 5,
}  # fmt: skip


def volume(claims: Sequence[Claim], run: Run) -> Drawing:
    """Bytes of all nodes a step: a bar per system, and the paper's numbers on them."""
    rows = {str(row.settings["strategy"]): row for row in run.rows}
    looks = strategies.styles(rows)
    with style():
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        ax = figure.subplots()
        for at, name in enumerate(looks):
            sent = rows[name].quantities["all_nodes_bytes"] / 1e9
            ax.barh(at, sent, axes.BAR, color=looks[name].colour)
            # At the edge, where no mark of the paper's stands on it.
            ax.annotate(f"{sent:.3g}", (1, at), xycoords=("axes fraction", "data"), ha="right",
                        va="center", fontsize=7.5)  # fmt: skip
        for claim in claims:
            for check in claim.checks:
                if isinstance(check.compute, Value) and check.compute.quantity == "all_nodes_bytes":
                    place = list(looks).index(str(check.compute.of.strategy))
                    ax.plot([claim.number], [place], **_PAPERS_MARK)  # type: ignore[arg-type]
        ax.set_yticks(range(len(looks)), [look.label for look in looks.values()])
        ax.set(xscale="log", xlabel="GB a step, all nodes", ylim=(len(looks) - 0.5, -0.5))
        ax.set_xlim(right=3000)
        ax.grid(False, axis="y")
        put_legend(figure, [Line2D([], [], **_PAPERS_MARK, label="the paper's")])  # type: ignore[arg-type]
    caption = (
        f"Bytes between nodes in a step, LoRA. The paper's table stands on the systems that it may "
        f"mean. {run.summary}"
    )
    return Drawing("paper-volume", "Bytes between nodes", caption, figure)


def scaling(run: Run) -> Drawing:
    """Throughput over nodes: a panel per model."""
    rows = [row for row in run.rows if row.quantities]
    models = sorted({str(row.settings["model"]) for row in rows})
    looks = strategies.styles(str(row.settings["strategy"]) for row in rows)
    with style():
        figure = Figure(figsize=(2.4 * len(models) + 0.6, 3.1), layout="constrained")
        for model, ax in zip(
            models, figure.subplots(1, len(models), squeeze=False)[0], strict=True
        ):
            for name, look in looks.items():
                of = {"model": model, "strategy": name}
                points = _points(rows, of, "nodes", "tokens_per_s")
                ax.plot(*points, color=look.colour, marker=look.marker, linestyle=look.dashes)
            ax.set_title(model)
            ax.set(xlabel="nodes of 8 A40", xticks=[1, 2, 4], ylim=(0, None))
        figure.axes[0].set_ylabel("tokens/s")
        put_legend(figure, [line(look) for look in looks.values()])
    caption = (
        "Tokens a second of the cluster with as many sequences a step on one, two and four nodes; "
        f"a point that is missing ran out of memory. {run.summary}"
    )
    return Drawing("paper-scaling", "Strong scaling", caption, figure)


def bandwidth(claims: Sequence[Claim], run: Run) -> Drawing:
    """What each system keeps of its speed on slower links, and the paper's two points."""
    rows = [row for row in run.rows if row.quantities and row.settings["model"] == LARGEST]
    looks = strategies.styles(str(row.settings["strategy"]) for row in rows)
    with style():
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        ax = figure.subplots()
        for name, look in looks.items():
            links, speeds = _points(rows, {"strategy": name}, "link", "tokens_per_s", _gigabits)
            kept = [100 * speed / speeds[-1] for speed in speeds]
            ax.plot(links, kept, color=look.colour, marker=look.marker, linestyle=look.dashes)
        for place, number in _kept(claims):
            ax.plot([place], [number], **_PAPERS_MARK)  # type: ignore[arg-type]
        ax.set(xscale="log", yscale="log", xlabel="link between nodes, Gbit/s")
        ax.set_ylabel("% of the throughput at 100 Gbit/s")
        ax.set_xticks([1, 10, 25, 100], ["1", "10", "25", "100"])
        ax.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        ax.minorticks_off()
        marks = [line(look) for look in looks.values()]
        put_legend(figure, [*marks, Line2D([], [], **_PAPERS_MARK, label="the paper's")])  # type: ignore[arg-type]
    caption = (
        f"Throughput with LoRA of {LARGEST} over bandwidth, as a share of its own. {run.summary}"
    )
    return Drawing("paper-bandwidth", "What is kept on slower links", caption, figure)


def _kept(claims: Sequence[Claim]) -> list[tuple[float, float]]:
    """The link in Gbit/s and the number of each claim that is a share with a number."""
    return [
        (_gigabits(check.compute.of.link), claim.number)
        for claim in claims
        for check in claim.checks
        if check.role == "result"
        and isinstance(check.compute, Ratio)
        and check.compute.of.link is not None
        and claim.unit == "%"
        and claim.number is not None
    ]


def policies(run: Run) -> Drawing:
    """Throughput and device memory over τ, beside policies that have none."""
    rows = [row for row in run.rows if row.quantities and row.settings["model"] == LARGEST]
    kinds = sorted({(str(r.settings["tuning"]), int(str(r.settings["micro_batch"]))) for r in rows})
    with style():
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        speed, memory = figure.subplots(1, 2)
        for (tuning, batch), colour, dash in zip(kinds, COLOURS, DASHES, strict=False):
            of = {"tuning": tuning, "micro_batch": batch}
            look = {"color": colour, "linestyle": dash, "marker": "o", "markersize": 3.5}
            found = [row for row in rows if _tau(row) is not None]
            for ax, quantity, unit in (
                (speed, "tokens_per_s", 1.0),
                (memory, "peak_device_bytes", 1e9),
            ):
                taus, values = _points(found, of, "policy", quantity, _tau_of)
                label = f"{tuning}, micro-batch {batch}"
                ax.plot(taus, [value / unit for value in values], label=label, **look)
        speed.set(xlabel="threshold τ", ylabel="tokens/s", ylim=(0, None))
        memory.set(xlabel="threshold τ", ylabel="device memory, GB", ylim=(0, None))
        handles, _ = speed.get_legend_handles_labels()
        put_legend(figure, [h for h in handles if isinstance(h, Line2D)], columns=len(kinds))
    caption = f"FCDP's threshold policy, {LARGEST}. {run.summary}"
    return Drawing("paper-policies", "Throughput and memory over τ", caption, figure)


def memory(run: Run) -> Drawing:
    """Device memory of each system at micro-batch 8, or that it runs out of it."""
    rows = {str(r.settings["strategy"]): r for r in run.rows if r.settings["model"] == LARGEST}
    looks = strategies.styles(rows)
    with style():
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        ax = figure.subplots()
        for at, (name, look) in enumerate(looks.items()):
            _memory_bar(ax, at, rows[name], look.colour)
        ax.set_yticks(range(len(looks)), [look.label for look in looks.values()])
        ax.set(xlabel="GB of device memory", ylim=(len(looks) - 0.5, -0.5))
        ax.margins(x=0.2)
        ax.grid(False, axis="y")
    caption = f"Full fine-tuning of {LARGEST} at micro-batch 8. {run.summary}"
    return Drawing("paper-memory", "Device memory", caption, figure)


def _memory_bar(ax: Axes, at: int, row: Row, colour: str) -> None:
    used = row.quantities.get("peak_device_bytes", 0.0) / 1e9
    ax.barh(at, used, axes.BAR, color=colour)
    said = f"{used:.3g}" if used else f"  {row.state}"
    ax.annotate(said, (used, at), xytext=(4, 0), textcoords="offset points", va="center",
                fontsize=7.5)  # fmt: skip


def losses(run: Run) -> Drawing:
    """The losses of all systems, one over another."""
    cells, setting = next(iter(matrix.parted(compare(run.records))))
    return matrix.draw_losses(cells, strategies.styles(cells["strategy"]), setting)


def bound(claims: Sequence[Claim], study: BoundStudy) -> Drawing:
    """The bound on utilisation over the size of models, and the claims' numbers."""
    sizes = {one.point.model: one.point.named_parameters for one in study.records}
    links = sorted({one.point.bandwidth_bits_per_s for one in study.records})
    with style():
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        ax = figure.subplots()
        for bits_per_s, colour, dash in zip(links, COLOURS, DASHES, strict=False):
            of = [one for one in study.records if one.point.bandwidth_bits_per_s == bits_per_s]
            ax.plot([one.point.named_parameters for one in of], [one.hfu_bound for one in of],
                    color=colour, linestyle=dash, marker="o", markersize=3.5,
                    label=f"{format_link(int(bits_per_s))} per GPU")  # fmt: skip
        for claim in claims:
            for check in claim.checks:
                if isinstance(check.compute, Value) and check.compute.quantity == "hfu_bound":
                    place = sizes[str(check.compute.of.model)]
                    ax.plot([place], [claim.number], **_PAPERS_MARK)  # type: ignore[arg-type]
        ax.axhline(1, color="0.5", linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel="parameters")
        ax.set_ylabel("bound, as a share of the GPU's peak")
        handles, _ = ax.get_legend_handles_labels()
        marks = [handle for handle in handles if isinstance(handle, Line2D)]
        given = Line2D([], [], **_PAPERS_MARK, label="numbers of the claims")  # type: ignore[arg-type]
        put_legend(figure, [*marks, given])
    caption = (
        "The most of a GPU's peak that FSDP can reach, by memory and bandwidth alone; above the "
        f"line at 1 kernels are the limit. {study.summary}"
    )
    return Drawing("paper-bound", "The bound on utilisation", caption, figure)


def of_kind(run: Run, kind: str) -> Drawing | None:
    """The first of a matrix's own figures of this kind; ``None`` where it has none."""
    drawn = matrix.draw(compare(run.records))
    return next((one for one in drawn if one.name.endswith(f"-{kind}")), None)


def _points(
    rows: Sequence[Row],
    of: Mapping[str, object],
    over: str,
    quantity: Quantity,
    place: Callable[[str], float] = float,
) -> tuple[list[float], list[float]]:
    """A quantity over a setting, in its order."""
    found = sorted(
        (place(str(row.settings[over])), row.quantities[quantity])
        for row in rows
        if all(row.settings[name] == value for name, value in of.items())
    )
    return [at for at, _ in found], [value for _, value in found]


def _gigabits(written: str) -> float:
    bits = link(written)
    assert bits is not None, "a link of the paper's has a bandwidth"
    return bits / 1e9


def _tau(row: Row) -> float | None:
    found = re.fullmatch(r"threshold\((.*)\)", str(row.settings["policy"]))
    return float(found[1]) if found else None


def _tau_of(policy: str) -> float:
    return float(policy.removeprefix("threshold(").removesuffix(")"))

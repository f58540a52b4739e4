"""Figures of the papers' tables: their numbers on our curves and bars, and our ranges."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import strategies, text
from analysis.claims.computations import Ratio, Selection, Value
from analysis.claims.papers import Claim
from analysis.claims.verdicts import quoted
from analysis.compare.baseline import compare
from analysis.figures import axes, matrix
from analysis.figures.drawings import Drawing, canvas, handle, line, put_legend
from analysis.load.rows import Quantity, Row
from analysis.load.runs import Run
from analysis.paper.region import Region
from experiments.records.comparison import grouped
from simulation.bound import BoundRecord
from simulation.quantities import format_link, link

#: Colours that a colour-blind reader can tell (Okabe and Ito), and dashes beside them.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (4, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (1, 2)),
    (0, (7, 2)),
)
#: The model that the paper's tables are about, where several were run.
LARGEST = "gpt-30b"
_PAPERS_MARK: dict[str, Any] = {
    "marker": "D",
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "markeredgewidth": 1.6,
    "markersize": 7,
    "linestyle": "none",
    "zorder": 5,
}


def volume(claims: Sequence[Claim], run: Run) -> Drawing:
    """Bytes of all nodes per step: a bar per system, with the paper's numbers on them."""
    rows = {str(row.settings["strategy"]): row for row in run.rows}
    looks = strategies.styles(rows)
    with canvas(6.4, 3.2) as (figure, ((ax,),)):
        for at, name in enumerate(looks):
            sent = rows[name].quantities["all_nodes_bytes"] / 1e9
            ax.barh(at, sent, axes.BAR, color=looks[name].colour)
            # At the edge, where no mark of the paper's stands on it.
            edge: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right"}
            ax.annotate(f"{sent:.3g}", (1, at), va="center", fontsize=7.5, **edge)
        for of, number in _numbers(claims, run.matrix, "all_nodes_bytes"):
            ax.plot([number], [list(looks).index(str(of.strategy))], **_PAPERS_MARK)
        axes.name_bars(ax, [look.label for look in looks.values()])
        ax.set(xscale="log", xlabel="GB a step, all nodes")
        ax.set_xlim(right=3000)
        put_legend(figure, [handle(**_PAPERS_MARK, label="the paper's")])
    caption = "Bytes between nodes, LoRA. The paper's table stands on the systems that it may mean."
    return Drawing("paper-volume", "Bytes between nodes", caption, figure)


def _numbers(
    claims: Sequence[Claim], matrix: str, quantity: Quantity
) -> Iterator[tuple[Selection, float]]:
    """The cells of a matrix, and the number of each claim on this quantity of theirs."""
    for claim in claims:
        for check in claim.checks:
            of = check.compute
            if check.matrix != matrix or claim.number is None:
                continue
            if isinstance(of, Value) and of.quantity == quantity:
                yield of.of, claim.number


def scaling(run: Run) -> Drawing:
    """Throughput over nodes: a panel per model."""
    rows = [row for row in run.rows if row.quantities]
    models = sorted({str(row.settings["model"]) for row in rows})
    looks = strategies.styles(str(row.settings["strategy"]) for row in rows)
    with canvas(2.4 * len(models) + 0.6, 3.1, 1, len(models)) as (figure, (grid,)):
        for model, ax in zip(models, grid, strict=True):
            for name, look in looks.items():
                of = {"model": model, "strategy": name}
                points = _points(rows, of, "nodes", "tokens_per_s")
                ax.plot(*points, color=look.colour, marker=look.marker, linestyle=look.dashes)
            ax.set_title(model)
            ax.set(xlabel="nodes of 8 A40", xticks=[1, 2, 4], ylim=(0, None))
        figure.axes[0].set_ylabel("tokens/s")
        put_legend(figure, [*map(line, looks.values())])
    caption = (
        "Tokens a second of the cluster with as many sequences a step on one, two and four nodes; "
        "a point that is missing ran out of memory."
    )
    return Drawing("paper-scaling", "Strong scaling", caption, figure)


def bandwidth(claims: Sequence[Claim], run: Run) -> Drawing:
    """Share of its speed that each system keeps on slower links, and the paper's two points."""
    rows = [row for row in run.rows if row.quantities and row.settings["model"] == LARGEST]
    looks = strategies.styles(str(row.settings["strategy"]) for row in rows)
    with canvas(5.2, 3.6) as (figure, ((ax,),)):
        for name, look in looks.items():
            links, speeds = _points(rows, {"strategy": name}, "link", "tokens_per_s", _gigabits)
            shares = [100 * speed / speeds[-1] for speed in speeds]
            ax.plot(links, shares, color=look.colour, marker=look.marker, linestyle=look.dashes)
        for place, number in _shares(claims):
            ax.plot([place], [number], **_PAPERS_MARK)
        ax.set(xscale="log", yscale="log", xlabel="link between nodes, Gbit/s")
        ax.set_ylabel("% of the throughput at 100 Gbit/s")
        ax.set_xticks([1, 10, 25, 100], ["1", "10", "25", "100"])
        ax.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        ax.minorticks_off()
        paper = handle(**_PAPERS_MARK, label="the paper's")
        put_legend(figure, [*map(line, looks.values()), paper])
    caption = f"Throughput with LoRA of {LARGEST} over bandwidth, as a share of its own."
    return Drawing("paper-bandwidth", "What is kept on slower links", caption, figure)


def _shares(claims: Sequence[Claim]) -> list[tuple[float, float]]:
    """The link in Gbit/s and the number of each claim about a share."""
    return [
        (_gigabits(check.compute.of.link), claim.number)
        for claim in claims
        if claim.unit == "%" and claim.number is not None
        for check in claim.checks
        if check.role == "result" and isinstance(check.compute, Ratio) and check.compute.of.link
    ]


def policies(run: Run) -> Drawing:
    """Device memory over τ; throughput, which hardly moves, as a sentence."""
    rows = [row for row in run.rows if row.quantities and row.settings["model"] == LARGEST]
    kinds = sorted({(str(r.settings["tuning"]), int(str(r.settings["micro_batch"]))) for r in rows})
    moves, drawn = list[float](), list[Line2D]()
    with canvas(5.2, 3.2) as (figure, ((ax,),)):
        for (tuning, batch), colour, dash in zip(kinds, COLOURS, DASHES, strict=False):
            of = {"tuning": tuning, "micro_batch": batch}
            look: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": "o"}
            sweep = [r for r in rows if str(r.settings["policy"]).startswith("threshold(")]
            taus, used = _points(sweep, of, "policy", "peak_device_bytes", _tau)
            label = f"{tuning}, micro-batch {batch}"
            memory = [value / 1e9 for value in used]
            drawn += ax.plot(taus, memory, label=label, markersize=3.5, **look)
            _, speeds = _points(sweep, of, "policy", "tokens_per_s", _tau)
            moves.append(max(speeds) / min(speeds) - 1)
        ax.set(xlabel="threshold τ", ylabel="device memory, GB", ylim=(0, None))
        put_legend(figure, drawn)
    most = text.percent(max(moves))
    caption = f"FCDP's threshold policy, {LARGEST}; over τ throughput moves by at most {most}."
    return Drawing("paper-policies", "Memory over τ", caption, figure)


def memory(run: Run) -> Drawing:
    """Device memory of each system at micro-batch 8, or its state where it runs out of it."""
    rows = {str(r.settings["strategy"]): r for r in run.rows if r.settings["model"] == LARGEST}
    looks = strategies.styles(rows)
    with canvas(6.0, 3.6) as (figure, ((ax,),)):
        for at, (name, look) in enumerate(looks.items()):
            used = rows[name].quantities.get("peak_device_bytes", 0.0) / 1e9
            _bar(ax, at, used, look.colour, f"{used:.3g}" if used else f"  {rows[name].state}")
        axes.name_bars(ax, [look.label for look in looks.values()])
        ax.set_xlabel("GB of device memory")
        ax.margins(x=0.2)
    caption = f"Full fine-tuning of {LARGEST} at micro-batch 8."
    return Drawing("paper-memory", "Device memory", caption, figure)


def _bar(ax: Axes, at: int, value: float, colour: str, label: str) -> None:
    ax.barh(at, value, axes.BAR, color=colour)
    axes.write_beside(ax, at, value, label, fontsize=7.5)


def apart(run: Run) -> Drawing:
    """The largest difference of each system's losses from those of the baseline."""
    cells = compare(run.records)
    most = cells.groupby("strategy", observed=True)["loss_difference_max"].max().dropna()
    looks = strategies.styles(most.index)
    with canvas(6.0, 0.24 * len(looks) + 0.8) as (figure, ((ax,),)):
        for at, (name, look) in enumerate(looks.items()):
            _bar(ax, at, max(most[name], _SAME_LOSS), look.colour, f"{most[name]:.2g}")
        axes.name_bars(ax, [look.label for look in looks.values()])
        ax.set(xscale="log", xlim=(_SAME_LOSS / 2, 10 * most.max()))
        ax.set_xlabel("largest difference of the training loss, logarithmic")
    caption = (
        f"Losses of {run.matrix}, each system's farthest from the baseline's at any step. Those at "
        "1e-6 and below differ in the order of sums; offloading has another optimizer, on CPUs, "
        "and the others round what they send."
    )
    return Drawing("paper-losses", "Losses apart", caption, figure)


def losses(run: Run) -> Drawing:
    """The losses of all systems, one over another."""
    cells, setting = next(iter(matrix.parted(compare(run.records))))
    return matrix.draw_losses(cells, strategies.styles(cells["strategy"]), setting)


def bound(claims: Sequence[Claim], records: Sequence[BoundRecord], summary: str) -> Drawing:
    """The bound on utilisation over the size of models, and the claims' numbers."""
    sizes = {record.point.model: record.point.named_parameters for record in records}
    by_link = grouped(records, lambda record: record.point.bandwidth_bits_per_s)
    by_link.sort(key=lambda of: of[0].point.bandwidth_bits_per_s)
    marks = list[Line2D]()
    with canvas(5.2, 3.4) as (figure, ((ax,),)):
        for of, colour, dash in zip(by_link, COLOURS, DASHES, strict=False):
            marks += ax.plot(
                [record.point.named_parameters for record in of],
                [record.hfu_bound for record in of],
                color=colour,
                linestyle=dash,
                marker="o",
                markersize=3.5,
                label=f"{format_link(int(of[0].point.bandwidth_bits_per_s))} per GPU",
            )
        for cells, number in _numbers(claims, "bound", "hfu_bound"):
            ax.plot([sizes[str(cells.model)]], [number], **_PAPERS_MARK)
        ax.axhline(1, color="0.5", linewidth=0.8)
        ax.set(xscale="log", yscale="log", xlabel="parameters")
        ax.set_ylabel("bound, as a share of the GPU's peak")
        put_legend(figure, [*marks, handle(**_PAPERS_MARK, label="worked out beforehand")])
    caption = (
        "The most of a GPU's peak that FSDP can reach, by memory and bandwidth alone; above the "
        f"line at 1 kernels are the limit. {summary}"
    )
    return Drawing("paper-bound", "The bound on utilisation", caption, figure)


def of_kind(run: Run, kind: str) -> Drawing | None:
    """The first of a matrix's own figures of this kind; ``None`` where it has none."""
    drawn = matrix.draw(compare(run.records))
    return next((drawing for drawing in drawn if drawing.name.endswith(f"-{kind}")), None)


def _points(
    rows: Sequence[Row],
    of: Mapping[str, object],
    over: str,
    quantity: Quantity,
    place: Callable[[str], float] = float,
) -> tuple[list[float], list[float]]:
    """A quantity over a setting, sorted by the setting."""
    points = sorted(
        (place(str(row.settings[over])), row.quantities[quantity])
        for row in rows
        if all(row.settings[name] == value for name, value in of.items())
    )
    return [at for at, _ in points], [value for _, value in points]


def _gigabits(written: str) -> float:
    bits = link(written)
    assert bits is not None, "a link of the paper's has a bandwidth"
    return bits / 1e9


def _tau(policy: str) -> float:
    return float(policy.removeprefix("threshold(").removesuffix(")"))


#: Colour of the paper's numbers.
PAPER = "#7F7F7F"


def ranges(
    name: str, title: str, claims: Sequence[Claim], of: Region, labels: Mapping[str, str]
) -> Drawing:
    """A line per number, below its short name: our range over the paper's number; the best point.

    The figure is as narrow as a phone.
    """
    numbers = [claim for claim in claims if claim.id in of.ranges and claim.number]
    with canvas(3.5, 0.31 * len(numbers) + 1.2) as (figure, ((ax,),)):
        for at, claim in enumerate(numbers):
            ranged, number = of.ranges[claim.id], of.paper[claim.id].number
            relative = of.paper[claim.id].tolerance.relative
            if relative is not None:
                ends = (1 - relative, 1 + relative)
                ax.fill_betweenx((at - 0.2, at + 0.2), *ends, color=PAPER, alpha=0.3, lw=0)
            low = max(ranged.low / number, _LEAST)
            ax.plot((low, max(ranged.high / number, low)), (at, at), color=COLOURS[1], lw=2.5)
            ax.plot(ranged.best / number, at, color=COLOURS[2], marker="o", linestyle="none")
            named = f"{labels.get(claim.id, claim.claim)}: {quoted(claim.number, claim.unit)}"
            ground: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            place = ax.get_yaxis_transform()
            ax.text(0, at - 0.25, named, transform=place, fontsize=7.5, bbox=ground)
        ax.axvline(1, color=PAPER, lw=1)
        ax.set_xscale("log")
        ax.set_xticks(ticks := (0.1, 0.25, 0.5, 1, 2, 4, 8), [f"{tick:g}×" for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel("ours over the paper's number")
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_ylim(len(numbers) - 0.5, -0.9)
        handles = [
            handle(color=COLOURS[1], lw=2.5, label="over all that it does not say"),
            handle(color=COLOURS[2], marker="o", linestyle="none", label="best point"),
            handle(color=PAPER, lw=5, alpha=0.4, label="near enough"),
        ]
        put_legend(figure, handles)
    caption = (
        f"{title}, by the paper's system, simulated: each number over what the paper does not "
        "say, as a share of the paper's own (a line), and where its numbers hold together best "
        "(a point)."
    )
    return Drawing(name, title, caption, figure)


#: The least difference on a logarithmic axis; smaller ones are drawn at it.
_SAME_LOSS = 1e-8
#: The least share on the axis; smaller ones are drawn at it, as is a gain that is a loss.
_LEAST = 0.05

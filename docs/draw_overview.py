"""Draws docs/figures/overview-*.svg: one step of ZeRO-3 beside one of FCDP, with their bytes.

The bytes are those of docs/memory.md's equations, for the model and the cluster that are drawn.
One file per palette, light and dark, since a page may be read in either.
"""

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import fcdp
from docs import memory

NODES, RANKS_PER_NODE = 2, 2
#: 10B parameters, of which adapters are a hundredth more; gathers and reductions in bf16.
PARAMETERS, LAYERS, ITEMSIZE, ADAPTERS = 10e9, 48, 2, 0.01

#: In inches, as all coordinates: a panel, from one to the next, and the heading above them.
PANEL, HEIGHT, STRIDE, HEAD = 4.75, 5.25, 5.05, 0.45
MARGIN = 0.1
#: Lower edges of the nodes, and the band of the link between them.
NODE_BOXES = ((3.6, "node 0"), (0.8, "node 1"))
LINK = (2.0, 3.6)
LINK_MIDDLE = sum(LINK) / 2
#: In points.
FONT = 11
HEADING = (
    "Least bytes per step of k micro-batches: full fine-tuning of 10B parameters in bf16, "
    "2 nodes × 2 GPUs"
)


@dataclass(frozen=True)
class Palette:
    """Colours of one of the two files."""

    name: str
    background: str
    text: str
    quiet: str
    box: str
    edge: str
    link: str
    #: Inter-node all-gathers, reductions, intra-node all-gathers, copies to and from the host.
    gather: str
    reduce: str
    inside: str
    host: str


PALETTES = (
    Palette(
        "light", "#ffffff", "#1f2328", "#59636e", "#f6f8fa", "#818b98", "#eaeef2",
        gather="#b04500", reduce="#6e4bb8", inside="#0b63b5", host="#116329",
    ),
    Palette(
        "dark", "#0d1117", "#f0f6fc", "#9198a1", "#161b22", "#656c76", "#21262d",
        gather="#ff9a4d", reduce="#c0a5f5", inside="#79b8ff", host="#56d364",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Bytes:
    """Bytes of one node that the arrows show, by the equations of docs/memory.md."""

    #: Sent to other nodes by one all-gather or one reduction of the whole model.
    crossing: float
    #: Exchanged inside the node by one all-gather of the whole model.
    inside: float
    #: The host arena, which each pass over clean units reads once.
    host: float
    #: Sent in full fine-tuning and with LoRA: by ZeRO-3 per micro-batch, by FCDP per step.
    sent: tuple[tuple[float, float], tuple[float, float]]


def quantities() -> Bytes:
    """The bytes of the model and the cluster that are drawn."""
    cluster = memory.Cluster(NODES, RANKS_PER_NODE)
    gathered = ITEMSIZE * PARAMETERS
    trained = ADAPTERS * gathered
    full = memory.traffic(gathered, gathered, NODES)
    blocks = memory.blocks(PARAMETERS, LAYERS, ITEMSIZE, cluster)
    return Bytes(
        crossing=full[1] / 2,
        inside=(RANKS_PER_NODE - 1) * gathered,
        host=RANKS_PER_NODE * memory.cache(fcdp.HostCache(), blocks, cluster).host,
        sent=(full, memory.traffic(gathered + trained, trained, NODES)),
    )


def gigabytes(count: float) -> str:
    """Write a size as the figure does: ``10 GB``, ``20.3 GB``."""
    return f"{count / memory.GB:.3g} GB"


@dataclass
class Panel:
    """One half of the figure."""

    axes: Axes
    palette: Palette
    amounts: Bytes

    def zero3(self) -> None:
        """Draw ZeRO-3: three crossings per micro-batch, host memory unused."""
        self._frame("ZeRO-3 (FSDP2, DeepSpeed stage 3)")
        for bottom, name in NODE_BOXES:
            self._node(bottom, name)
            self._box(3.85, bottom + 0.15, 0.8, 0.9, self.palette.background, ls="--")
            self._text(4.25, bottom + 0.6, "host\nmemory\nunused", self.palette.quiet)
        crossing = f"k × {gigabytes(self.amounts.crossing)}"
        self._crossing(0.5, f"all-gather\nin forward\n{crossing}", self.palette.gather)
        self._crossing(1.95, f"all-gather\nin backward\n{crossing}", self.palette.gather)
        self._crossing(3.4, f"reduce-\nscatter\n{crossing}", self.palette.reduce)
        full, lora = (f"k × {gigabytes(sent[0])}" for sent in self.amounts.sent)
        self._total(full, lora)

    def fcdp(self) -> None:
        """Draw FCDP: two crossings per step; later all-gathers start from the host arena."""
        self._frame("FCDP")
        for bottom, name in NODE_BOXES:
            self._node(bottom, name)
            self._arena(bottom)
        crossing = gigabytes(self.amounts.crossing)
        self._crossing(0.5, f"all-gather\nin forward\n{crossing}", self.palette.gather)
        self._text(
            2.07, LINK_MIDDLE, "all-gather\nin backward\nnone", self.palette.quiet, ha="left"
        )
        self._crossing(3.4, f"reduce-\nscatter\n{crossing}", self.palette.reduce)
        full, lora = (gigabytes(sent[1]) for sent in self.amounts.sent)
        self._total(full, lora)

    def _frame(self, name: str) -> None:
        look = {"ha": "left", "va": "baseline", "fontsize": FONT + 3, "weight": "bold"}
        self._text(0.0, 4.96, name, self.palette.text, **look)
        self._box(0.0, LINK[0], PANEL, LINK[1] - LINK[0], self.palette.link, ec="none")
        self._text(0.18, LINK_MIDDLE, "slow link", self.palette.quiet, rotation=90)

    def _node(self, bottom: float, name: str) -> None:
        palette = self.palette
        self._box(0.0, bottom, PANEL, 1.2, palette.box)
        self._text(0.1, bottom + 1.0, name, palette.quiet, ha="left")
        within = f"intra-node all-gather 2k × {gigabytes(self.amounts.inside)}"
        self._text(0.85, bottom + 1.0, within, palette.inside, ha="left")
        self._box(0.1, bottom + 0.09, 1.9, 0.67, palette.box)
        for left, gpu in ((0.17, "GPU 0"), (1.23, "GPU 1")):
            self._box(left, bottom + 0.16, 0.7, 0.53, palette.background)
            self._text(left + 0.35, bottom + 0.42, gpu, palette.text)
        self._arrow((0.87, bottom + 0.42), (1.23, bottom + 0.42), palette.inside, both=True)

    def _arena(self, bottom: float) -> None:
        """Draw the host arena of one node, with what is stored in it and loaded from it."""
        palette, held = self.palette, gigabytes(self.amounts.host)
        self._box(3.85, bottom + 0.15, 0.8, 0.9, palette.background, ec=palette.host)
        self._text(4.25, bottom + 0.6, f"host\narena\n{held}", palette.text)
        self._arrow((2.0, bottom + 0.53), (3.85, bottom + 0.53), palette.host, both=False)
        self._text(2.92, bottom + 0.69, f"store {held}", palette.host)
        self._arrow((3.85, bottom + 0.32), (2.0, bottom + 0.32), palette.host, both=False)
        self._text(2.92, bottom + 0.15, f"load (2k−1) × {held}", palette.host)

    def _crossing(self, x: float, label: str, colour: str) -> None:
        self._arrow((x, LINK[0]), (x, LINK[1]), colour, both=True)
        self._text(x + 0.12, LINK_MIDDLE, label, colour, ha="left")

    def _total(self, full: str, lora: str) -> None:
        lines = f"one node sends {full}\nwith LoRA, 1 % trained: {lora}"
        self._text(0.0, 0.4, lines, self.palette.text, ha="left", weight="bold")

    def _text(self, x: float, y: float, text: str, colour: str, **look: Any) -> None:
        usual = {"ha": "center", "va": "center", "fontsize": FONT, "linespacing": 1.25}
        self.axes.text(x, y, text, color=colour, **usual | look)

    def _box(
        self, x: float, y: float, width: float, height: float, colour: str, **look: Any
    ) -> None:
        look = {"boxstyle": "round,pad=0,rounding_size=0.06", "ec": self.palette.edge} | look
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, fc=colour, lw=1, **look))

    def _arrow(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, *, both: bool
    ) -> None:
        style = {"arrowstyle": "<|-|>" if both else "-|>", "color": colour, "lw": 2}
        self.axes.annotate(
            "", end, start, arrowprops={**style, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
        )


def draw(palette: Palette, columns: int = 2) -> Figure:
    """The figure in one palette, its halves beside each other or, in one column, stacked."""
    rows = 2 // columns
    width, height = columns * STRIDE - MARGIN, rows * HEIGHT + HEAD
    figure = Figure(figsize=(width, height), facecolor=palette.background)
    heading = HEADING if columns == 2 else HEADING.replace(": ", ":\n")
    figure.text(
        MARGIN / width, 1 - 0.25 / height, heading, color=palette.quiet, va="center", fontsize=FONT
    )
    panels, amounts = [], quantities()
    for at in range(2):
        left, bottom = at % columns * STRIDE, (rows - 1 - at // columns) * HEIGHT
        size = PANEL + 2 * MARGIN, HEIGHT
        axes = figure.add_axes(
            (left / width, bottom / height, size[0] / width, size[1] / height),
            xlim=(-MARGIN, PANEL + MARGIN),
            ylim=(0, HEIGHT),
        )
        axes.set_axis_off()
        panels.append(Panel(axes, palette, amounts))
    panels[0].zero3()
    panels[1].fcdp()
    return figure


def figures() -> dict[str, Figure]:
    """The figures by the names of their files; narrow ones are for phones."""
    return {
        f"overview-{palette.name}{end}": draw(palette, columns)
        for palette in PALETTES
        for end, columns in (("", 2), ("-narrow", 1))
    }

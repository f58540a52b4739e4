"""Draws docs/figures/map.svg and scale.svg: which strategy pays where, by the planner.

Both are drawn from docs/figures/map.json, which ``compute`` writes.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import text
from analysis.figures.drawings import canvas
from baselines.registry import find
from simulation.compute import with_rates
from simulation.hardware import Hardware, cluster, reported
from simulation.planner.plan import millions, plan
from simulation.planner.request import Request

DATA = Path(__file__).resolve().parent / "figures" / "map.json"
MODELS = ("gemma-2b", "llama-3-8b", "phi-4", "qwen2.5-32b", "llama-3-70b")
GPUS = ("a40", "a100-80gb")
GBIT_S = (0.1, 0.3, 1, 3, 10, 25, 100, 400)
NODES = (1, 4, 16, 64, 256, 1024)
#: Tokens of a step of all ranks.
STEPS = (2**17, 2**19, 2**21)
#: Exact strategies of each kind; the curves by nodes have those that are not cut.
CURVES = ("ddp", "fsdp2", "fsdp2-hsdp", "deepspeed-hpz", "fsdp2-offload", "fcdp")
STRATEGIES = (
    "ddp", "fsdp2", "fsdp2-hsdp", "fsdp2-hsdp-offload", "fsdp2-offload", "hpz",
    "deepspeed-hpz-offload", "pipeline", "fcdp", "fcdp-offload",
)  # fmt: skip
TUNINGS: Mapping[str, Mapping[str, Any]] = {
    "full fine-tuning": {},
    "LoRA 8 on bf16": {"lora_rank": 8},
}
LENGTH = 2048
#: Nodes, model and link of the map, and of the curves by nodes; tokens of a step of the map.
_NODES, _MODEL, _LINK, _STEP = 4, "llama-3-8b", 100.0, 2**19
#: Gbit/s up to which a link counts as slow, and the shares of speed that count as alike.
_SLOW, _ALIKE = 25, 0.06


def rented(gpu: str, nodes: int, gbit_s: float) -> Hardware:
    """Nodes of eight GPUs, as ``experiments plan`` models them."""
    bits = 1e9 * gbit_s
    return with_rates(reported(cluster(gpu, nodes=nodes, ranks_per_node=8, inter_bits_per_s=bits)))


def cell(
    model: str, gpu: str, nodes: int, gbit_s: float, tuning: str, step: int | None
) -> dict[str, Any]:
    """Return what the planner takes, and tokens per second of each strategy that fits.

    ``step`` are its tokens; ``None``: a micro-batch of each rank.
    """
    request = Request(
        model=model,
        hardware=rented(gpu, nodes, gbit_s),
        strategies=CURVES if step is None else STRATEGIES,
        sequence_lengths=(LENGTH,),
        global_batch=None if step is None else step // LENGTH,
        **TUNINGS[tuning],
    )
    made = plan(request)
    fitting = () if made is None else [one for one in made.verdicts if one.best is not None]
    options = {one.name: one.best for one in fitting if one.best is not None}
    inside = options.get("pipeline of fcdp")
    return {
        "model": model,
        "gpu": gpu,
        "nodes": nodes,
        "gbit_s": gbit_s,
        "tuning": tuning,
        "step": step,
        "take": None if made is None else made.taken.name,
        "nodes_per_stage": inside and inside.workload.nodes_per_stage,
        "tokens_per_s": {name: round(of.tokens_per_s, 1) for name, of in options.items()},
    }


def compute() -> None:
    """Write all cells of both figures, one line each."""
    map_cells = [
        cell(model, gpu, _NODES, gbit_s, tuning, step)
        for tuning in TUNINGS
        for gpu in GPUS
        for model in MODELS
        for gbit_s in GBIT_S
        for step in STEPS
    ]
    more = [
        cell(_MODEL, GPUS[1], nodes, _LINK, tuning, None) for tuning in TUNINGS for nodes in NODES
    ]
    lines = ",\n".join(json.dumps(entry) for entry in map_cells + more)
    DATA.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def share() -> str:
    """How many cells of slow links a form of FCDP wins, ties and loses, as Markdown."""
    cells = json.loads(DATA.read_text(encoding="utf-8"))
    slow = _slow(cells)
    rows = []
    for tuning, step in product(TUNINGS, STEPS):
        rows.append((tuning, f"{millions(step)}", *_counts(_of(slow, tuning=tuning, step=step))))
    rows.append(("all", "", *_counts(slow)))
    numbers = ("Cells", *(f"Ahead {where}" for where in _WHERE), "Within 6 %", "Behind")
    return text.table(("Tuning", "Tokens per step", *numbers), rows, ("Tuning",))


def share_in_words() -> str:
    """The same of all cells, in a sentence."""
    cells = json.loads(DATA.read_text(encoding="utf-8"))
    count, alone, groups, inside, alike, behind = _counts(_slow(cells))
    return (
        f"On a [map](docs/planning.md#where-fcdp-pays) of {count} simulated plans up to {_SLOW} "
        f"Gbit/s FCDP alone is ahead of all that is exact by more than {_ALIKE:.0%} in {alone}, a "
        f"pipeline with FCDP inside its stages in {int(groups) + int(inside)}; a form of FCDP is "
        f"as fast in {alike}, and behind in {behind}."
    )


#: Places of FCDP where it is ahead, as the table has them.
_WHERE = ("alone", "in stages of several nodes", "in stages of a node")


def _slow(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Cells of the map, not of the curves, whose link counts as slow."""
    return [each for each in cells if each["step"] and each["gbit_s"] <= _SLOW]


def _counts(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The numbers of cells by how FCDP's best form stands to the fastest exact rival."""
    counts = Counter(map(_standing, cells))
    return [str(len(cells)), *(str(counts[key]) for key in (*_WHERE, "within", "behind"))]


def _standing(entry: Mapping[str, Any]) -> str:
    """Where FCDP's best form is ahead, or that it is not."""
    own, other = _best(entry, True), _best(entry, False)
    if own <= (1 + _ALIKE) * other:
        return "behind" if other > (1 + _ALIKE) * own else "within"
    if own != entry["tokens_per_s"].get("pipeline of fcdp"):
        return _WHERE[0]
    return _WHERE[1 if entry["nodes_per_stage"] > 1 else 2]


def _best(entry: Mapping[str, Any], fcdp: bool) -> float:
    """Tokens per second of the fastest form of FCDP, or of all else; 0 if none fits."""
    speeds = entry["tokens_per_s"].items()
    return max((of for name, of in speeds if ("fcdp" in name) == fcdp), default=0.0)


def draw_map(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel per GPU and tuning: the choice by model and bandwidth; FCDP over its best rival.

    FCDP is its best form, in a pipeline too.
    """
    with canvas(8.2, 5.2, len(TUNINGS), len(GPUS), sharex=True, sharey=True) as (figure, axes):
        for row, tuning in zip(axes, TUNINGS, strict=True):
            for ax, gpu in zip(row, GPUS, strict=True):
                ax.set(title=f"{tuning}, {_NODES} × 8 {gpu}")
                ax.grid(visible=False)  # its lines would run through the numbers
                ax.set_xticks(range(len(GBIT_S)), [f"{value:g}" for value in GBIT_S])
                ax.set_yticks(range(len(MODELS)), MODELS)
                ax.set(xlim=(-0.5, len(GBIT_S) - 0.5), ylim=(-0.5, len(MODELS) - 0.5))
                for entry in _of(cells, step=_STEP, gpu=gpu, tuning=tuning):
                    x, y = GBIT_S.index(entry["gbit_s"]), MODELS.index(entry["model"])
                    colour = _colour(entry["take"])
                    corners = [x - 0.5, x + 0.5, x + 0.5, x - 0.5], [y - 0.5] * 2 + [y + 0.5] * 2
                    ax.fill(*corners, color=colour, alpha=0.55, linewidth=0)
                    ax.text(x, y, _gain(entry), ha="center", va="center", fontsize=6)
        for ax in axes[-1]:
            ax.set_xlabel("Gbit/s per node")
        shown = _of(cells, step=_STEP)
        taken = sorted({entry["take"] for entry in shown if entry["take"]})
        patches = [Patch(color=_colour(name), alpha=0.55, label=name) for name in taken]
        if any(entry["take"] is None for entry in shown):
            patches.append(Patch(color=_colour(None), label="nothing fits"))
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=7)
    return figure


def draw_scale(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """Tokens per second and GPU of each strategy, from 8 to 8,192 GPUs."""
    with canvas(7.4, 3.0, 1, len(TUNINGS)) as (figure, (grid,)):
        for ax, tuning in zip(grid, TUNINGS, strict=True):
            rows = _of(cells, step=None, tuning=tuning)
            for name in CURVES:
                points = [
                    (8 * entry["nodes"], entry["tokens_per_s"][name] / (8 * entry["nodes"]))
                    for entry in sorted(rows, key=lambda entry: entry["nodes"])
                    if name in entry["tokens_per_s"]
                ]
                look = find(name).look
                if points:
                    ax.plot(
                        *zip(*points, strict=True), look.marker, ls="-", c=look.colour, label=name
                    )
            ax.set(title=tuning, xscale="log", xlabel="GPUs", ylim=(0, None))
            ax.set_xticks([8 * nodes for nodes in NODES], [f"{8 * nodes}" for nodes in NODES])
        figure.axes[0].set_ylabel("tokens/s per GPU")
        figure.axes[1].legend(fontsize=6, loc="lower left")
    return figure


def _of(cells: Sequence[Mapping[str, Any]], **settings: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in cells if all(entry[key] == value for key, value in settings.items())]


def _colour(name: str | None) -> str:
    """The colour of what is taken; a pipeline with FCDP inside is darker."""
    if name is None:
        return "0.9"
    return "#0B5E8A" if name == "pipeline of fcdp" else find(name).look.colour


def _gain(entry: Mapping[str, Any]) -> str:
    """The speed of FCDP's best form over that of the fastest other, or which of them fits alone."""
    own, other = _best(entry, True), _best(entry, False)
    if not own or not other:
        return "alone" if own else ""
    return f"{own / other:.2f}"


def figures() -> dict[str, Figure]:
    """The figures by the names of their files."""
    cells = json.loads(DATA.read_text(encoding="utf-8"))
    return {"map": draw_map(cells), "scale": draw_scale(cells)}

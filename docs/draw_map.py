"""Draws docs/figures/map.svg and scale.svg: which strategy pays where, by the planner.

Both are drawn from docs/figures/map.json, which ``compute`` writes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.figures.drawings import canvas
from baselines.registry import find
from simulation.compute import with_rates
from simulation.hardware import Hardware, cluster, reported
from simulation.planner.plan import plan
from simulation.planner.request import Request

DATA = Path(__file__).resolve().parent / "figures" / "map.json"
MODELS = ("gemma-2b", "llama-3-8b", "phi-4", "qwen2.5-32b", "llama-3-70b")
GPUS = ("a40", "a100-80gb")
GBIT_S = (0.1, 0.3, 1, 3, 10, 30, 100, 400)
NODES = (1, 4, 16, 64, 256, 1024)
STRATEGIES = ("ddp", "fsdp2", "fsdp2-hsdp", "deepspeed-hpz", "fsdp2-offload", "fcdp")
TUNINGS: Mapping[str, Mapping[str, Any]] = {
    "full fine-tuning": {},
    "LoRA 8 on bf16": {"lora_rank": 8},
}
LENGTH = 2048
#: Nodes, model and link of the map, and of the curves by nodes.
_NODES, _MODEL, _LINK = 4, "llama-3-8b", 100.0


def rented(gpu: str, nodes: int, gbit_s: float) -> Hardware:
    """Nodes of eight GPUs, as ``experiments plan`` models them."""
    bits = 1e9 * gbit_s
    return with_rates(reported(cluster(gpu, nodes=nodes, ranks_per_node=8, inter_bits_per_s=bits)))


def cell(model: str, gpu: str, nodes: int, gbit_s: float, tuning: str) -> dict[str, Any]:
    """The strategy that the planner chooses, and tokens per second of each that fits."""
    request = Request(
        model=model,
        hardware=rented(gpu, nodes, gbit_s),
        strategies=STRATEGIES,
        sequence_lengths=(LENGTH,),
        **TUNINGS[tuning],
    )
    made = plan(request)
    verdicts = () if made is None else made.verdicts
    return {
        "model": model,
        "gpu": gpu,
        "nodes": nodes,
        "gbit_s": gbit_s,
        "tuning": tuning,
        "take": None if made is None else made.strategy,
        "tokens_per_s": {
            one.strategy: round(one.best.tokens_per_s, 1) for one in verdicts if one.best
        },
    }


def compute() -> None:
    """Write all cells of both figures, one line each."""
    map_cells = [
        cell(model, gpu, _NODES, gbit_s, tuning)
        for tuning in TUNINGS
        for gpu in GPUS
        for model in MODELS
        for gbit_s in GBIT_S
    ]
    more = [
        cell(_MODEL, GPUS[1], nodes, _LINK, tuning)
        for tuning in TUNINGS
        for nodes in NODES
        if nodes != _NODES
    ]
    lines = ",\n".join(json.dumps(entry) for entry in map_cells + more)
    DATA.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def draw_map(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel per GPU and tuning: the choice by model and bandwidth; FCDP over its best rival."""
    with canvas(8.2, 5.2, len(TUNINGS), len(GPUS), sharex=True, sharey=True) as (figure, axes):
        for row, tuning in zip(axes, TUNINGS, strict=True):
            for ax, gpu in zip(row, GPUS, strict=True):
                ax.set(title=f"{tuning}, {_NODES} × 8 {gpu}")
                ax.grid(visible=False)  # its lines would run through the numbers
                ax.set_xticks(range(len(GBIT_S)), [f"{value:g}" for value in GBIT_S])
                ax.set_yticks(range(len(MODELS)), MODELS)
                ax.set(xlim=(-0.5, len(GBIT_S) - 0.5), ylim=(-0.5, len(MODELS) - 0.5))
                for entry in _of(cells, nodes=_NODES, gpu=gpu, tuning=tuning):
                    x, y = GBIT_S.index(entry["gbit_s"]), MODELS.index(entry["model"])
                    colour = "0.9" if entry["take"] is None else find(entry["take"]).look.colour
                    corners = [x - 0.5, x + 0.5, x + 0.5, x - 0.5], [y - 0.5] * 2 + [y + 0.5] * 2
                    ax.fill(*corners, color=colour, alpha=0.55, linewidth=0)
                    ax.text(x, y, _gain(entry), ha="center", va="center", fontsize=6)
        for ax in axes[-1]:
            ax.set_xlabel("Gbit/s per node")
        taken = [name for name in STRATEGIES if any(entry["take"] == name for entry in cells)]
        patches = [Patch(color=find(name).look.colour, alpha=0.55, label=name) for name in taken]
        if any(entry["take"] is None for entry in cells):
            patches.append(Patch(color="0.9", label="nothing fits"))
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=7)
    return figure


def draw_scale(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """Tokens per second and GPU of each strategy, from 8 to 8,192 GPUs."""
    with canvas(7.4, 3.0, 1, len(TUNINGS)) as (figure, (grid,)):
        for ax, tuning in zip(grid, TUNINGS, strict=True):
            rows = _of(cells, model=_MODEL, gpu=GPUS[1], gbit_s=_LINK, tuning=tuning)
            for name in STRATEGIES:
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


def _gain(entry: Mapping[str, Any]) -> str:
    """FCDP's speed over that of the fastest other, or which of them fits alone."""
    speeds = dict(entry["tokens_per_s"])
    fcdp = speeds.pop("fcdp", None)
    if fcdp is None or not speeds:
        return "" if fcdp is None else "alone"
    return f"{fcdp / max(speeds.values()):.2f}"


def figures() -> dict[str, Figure]:
    """The figures by the names of their files."""
    cells = json.loads(DATA.read_text(encoding="utf-8"))
    return {"map": draw_map(cells), "scale": draw_scale(cells)}

"""Draws docs/figures/bound.svg: the closed form of memory and bandwidth beside the simulator."""

from typing import Any

from matplotlib.figure import Figure

from analysis.figures.drawings import canvas
from simulation import bound
from simulation.bound import points_on
from simulation.compute import rates_of
from simulation.hardware import cluster, gpu
from simulation.prediction import largest_micro_batch
from simulation.transformer import Transformer
from simulation.workload import Workload

#: Okabe and Ito's colours.
GPUS = {
    "v100-16gb": "#999999",
    "v100-32gb": "#56B4E9",
    "a100-40gb": "#0072B2",
    "a100-80gb": "#E69F00",
    "h100-sxm": "#009E73",
}
#: Gbit/s per GPU, which is what the closed form means; and how each is drawn.
BANDWIDTHS = {100.0: "--", 200.0: "-"}
_STEPS = 25
_LENGTH = bound.SEQUENCE_LENGTH
_VOCABULARY = 50_257


def kernels_share(name: str) -> float:
    """α̂ at most: the share of the GPU's peak that matrix products reached in published runs."""
    device = gpu(name)
    return rates_of(device).products_per_s / device.peak_flops


def tokens_that_fit(layers: int, width: int, gpus: int, vocabulary: int) -> int:
    """Tokens per GPU that the simulator's memory has room for, all blocks recomputed."""
    model = Transformer(
        name="bound",
        family="gpt2",
        layers=layers,
        width=width,
        heads=width // 64,
        vocabulary=vocabulary,
        mlp_width=4 * width,
        key_value_heads=width // 64,
        tied=True,
    )
    workload = Workload(
        strategy="fsdp2", model=model, sequence_length=_LENGTH, micro_batch=1, recomputed=1.0
    )
    nodes = max(1, gpus // 8)
    hardware = cluster(bound.GPU, nodes=nodes, ranks_per_node=gpus // nodes, inter_bits_per_s=8e11)
    return _LENGTH * largest_micro_batch(workload, hardware)


def draw() -> Figure:
    """Four panels by parameters: most MFU, most tokens per second, longest context, tokens."""
    with canvas(8.2, 5.4, 2, 2) as (figure, ((mfu, speed), (context, tokens))):
        for name, colour in GPUS.items():
            share = kernels_share(name)
            for gbit_s, line in BANDWIDTHS.items():
                _maxima(mfu, speed, name, gbit_s, share, {"color": colour, "ls": line})
            sizes = [(point.parameters, point.tokens()) for point in points_on(gpu(name), 100e9)]
            fits = [pair for pair in sizes if pair[1] >= 1]
            context.plot(*zip(*fits, strict=True), color=colour, marker=".")
        _distance(tokens)
        mfu.set(title="most MFU, kernels' share as measured", ylabel="MFU", ylim=(0, 1))
        speed.set(title="most tokens per second and GPU", ylabel="tokens/s per GPU", yscale="log")
        context.set(title="longest context: one sequence per GPU", ylabel="tokens", yscale="log")
        tokens.set(title=f"tokens that fit an {bound.GPU}", ylabel="tokens per GPU", yscale="log")
        tokens.legend(fontsize=6)
        for ax in (mfu, speed, context, tokens):
            ax.set(xscale="log", xlabel="parameters")
        for name, colour in GPUS.items():
            mfu.plot([], [], color=colour, label=name)
        for gbit_s, line in BANDWIDTHS.items():
            mfu.plot([], [], color="0.3", ls=line, label=f"{gbit_s:g} Gbit/s per GPU")
        figure.legend(
            *mfu.get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=6
        )
    return figure


def _maxima(
    mfu: Any, speed: Any, name: str, gbit_s: float, share: float, look: dict[str, str]
) -> None:
    """The best of the grid over stages, kept activations and kernels, by the sizes that fit."""
    maxima = []
    for point in points_on(gpu(name), 1e9 * gbit_s):
        steps = [*point.grid(_STEPS, share)]
        if steps:
            fastest = max(step.tokens_per_gpu_s for step in steps)
            maxima.append((point.parameters, max(step.mfu for step in steps), fastest))
    if maxima:
        sizes, shares, speeds = zip(*maxima, strict=True)
        mfu.plot(sizes, shares, **look)
        speed.plot(sizes, speeds, **look)


def _distance(ax: Any) -> None:
    """The closed form's tokens, the simulator's without an output layer, and the simulator's."""
    rows = []
    for point in points_on(gpu(bound.GPU), 100e9):
        size = point.layers, point.width, point.gpus
        rows.append(
            (
                point.parameters,
                point.tokens(),
                tokens_that_fit(*size, vocabulary=1),
                tokens_that_fit(*size, vocabulary=_VOCABULARY),
            )
        )
    sizes, closed, without, simulated = zip(*rows, strict=True)
    ax.plot(sizes, closed, color="0.4", ls="--", label="closed form")
    ax.plot(sizes, without, color="#0072B2", ls=":", label="simulator, without an output layer")
    ax.plot(sizes, simulated, color="#0072B2", label="simulator, eager loss over 50,257 words")

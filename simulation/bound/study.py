"""The closed form's answers for the paper's sizes: one line of ``bound.jsonl`` per point."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import Field

from simulation import files
from simulation.bound import closed_form
from simulation.bound.closed_form import Cluster, Shape
from simulation.files import Strict
from simulation.hardware import gpu

#: Sizes as the paper names them, and 30B: billions of parameters, layers, width, GPUs.
MODELS = (
    (1.3, 24, 2048, 8),
    (7, 32, 4096, 8),
    (13, 40, 5120, 8),
    (30, 48, 7168, 32),
    (66, 80, 8192, 64),
    (175, 96, 12288, 512),
    (310, 96, 16384, 512),
)
#: Those that the committed records answer.
_RECORDED = (1.3, 7, 13, 66, 175, 310)
GPU = "a100-40gb"
_BITS_PER_S = (100e9, 200e9)
SEQUENCE_LENGTH, _LONGER = 2048, 4


class Point(Strict):
    """A question: a model of L layers of width H, N GPUs alike, a sequence length."""

    #: As the paper names the size, and what that is in parameters.
    model: str
    named_parameters: float
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    gpus: int = Field(ge=1)
    memory_bytes: float
    bandwidth_bits_per_s: float
    peak_flops: float
    sequence_length: int = Field(ge=1)


class Gains(Strict):
    """Factors of the bound on utilisation, each by a change of one thing alone."""

    twice_bandwidth: float
    #: Twice what parameters, gradients and optimizer states leave of the GPU's memory.
    twice_free_memory: float
    #: Sequences of four times as many tokens; and the factor of tokens per second.
    longer_sequences: float
    longer_sequences_tokens_per_s: float


class BoundRecord(Strict):
    """The answers for one point; activations are recomputed but where the best choice is sought."""

    point: Point
    evidence: Literal["simulated"] = "simulated"
    #: φ = 12·L·H².
    parameters: int
    free_bytes: float
    #: Tokens per GPU and step that fill its memory.
    tokens: float
    #: Bound on utilisation with recomputation, before the kernels' own; may exceed 1.
    hfu_bound: float
    #: Bandwidth per GPU that a bound of 1 needs.
    required_bits_per_s: float
    #: The most MFU over stages, kept activations and kernels' efficiency.
    best_mfu: float
    gains: Gains
    commit: str | None
    started_at: str


def read(path: Path) -> list[BoundRecord]:
    """Read ``bound.jsonl``. Raises ``ValueError`` with the line."""
    return files.read_as(path, BoundRecord)


def points() -> list[Point]:
    """The paper's sizes, each at its two bandwidths."""
    device = gpu(GPU)
    return [
        Point(
            model=f"{billions:g}B",
            named_parameters=billions * 1e9,
            layers=layers,
            width=width,
            gpus=gpus,
            memory_bytes=device.memory_bytes,
            bandwidth_bits_per_s=bits,
            peak_flops=device.peak_flops,
            sequence_length=SEQUENCE_LENGTH,
        )
        for billions, layers, width, gpus in MODELS
        if billions in _RECORDED
        for bits in _BITS_PER_S
    ]


def settle(point: Point, commit: str | None) -> BoundRecord:
    """Answer a point by the closed form; ``commit`` is the one that the record names."""
    shape = closed_form.Shape(layers=point.layers, width=point.width)
    cluster = closed_form.Cluster(
        gpus=point.gpus,
        memory_bytes=point.memory_bytes,
        bandwidth_bytes_per_s=point.bandwidth_bits_per_s / 8,
        peak_flops=point.peak_flops,
    )
    length = point.sequence_length
    best = closed_form.grid_search(shape, cluster, length).mfu
    assert best is not None, "all of the paper's models fit"
    required = closed_form.required_bandwidth_bytes_per_s(shape, cluster, length, target=1.0)
    return BoundRecord(
        point=point,
        parameters=shape.parameters,
        free_bytes=closed_form.free_bytes(shape, cluster),
        tokens=closed_form.token_capacity(shape, cluster),
        hfu_bound=closed_form.hfu_bound(shape, cluster, length),
        required_bits_per_s=8 * required,
        best_mfu=best.estimate.mfu,
        gains=_gains(shape, cluster, length),
        commit=commit,
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _gains(shape: Shape, cluster: Cluster, length: int) -> Gains:
    bandwidth, memory = cluster.bandwidth_bytes_per_s, cluster.memory_bytes
    faster = replace(cluster, bandwidth_bytes_per_s=2 * bandwidth)
    larger = replace(cluster, memory_bytes=memory + closed_form.free_bytes(shape, cluster))
    usual = closed_form.hfu_bound(shape, cluster, length)
    steps = [closed_form.estimate(shape, cluster, tokens) for tokens in (length, _LONGER * length)]
    short, long = (step.tokens_per_gpu_s for step in steps if step is not None)
    return Gains(
        twice_bandwidth=closed_form.hfu_bound(shape, faster, length) / usual,
        twice_free_memory=closed_form.hfu_bound(shape, larger, length) / usual,
        longer_sequences=closed_form.hfu_bound(shape, cluster, _LONGER * length) / usual,
        longer_sequences_tokens_per_s=long / short,
    )

"""The bound that memory and bandwidth set to FSDP's utilisation, at the paper's model sizes.

"Memory and Bandwidth are All You Need for FSDP" (arXiv 2504.03655). The formulas are papers.md 5.2
to 5.4, whose label is [R]: recalled and made consistent, not read in the paper. Symbols are the
paper's: φ = 12·L·H² parameters, Q bytes per element, N GPUs, l tokens per sequence, E tokens per
GPU and step, γ the share of intermediate activations that is kept (0: full checkpointing), α̂ the
share of the peak that kernels reach. The study's answers are one line of ``bound.jsonl`` per point.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import Field

from simulation import checks, files
from simulation.files import Strict
from simulation.hardware import gpu

#: What is sharded: optimizer states and gradients (ZeRO-1/2), or parameters too (ZeRO-3).
Stage = Literal["zero-1/2", "zero-3"]
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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of L layers of width H."""

    layers: int
    width: int
    element_bytes: int = 2

    def __post_init__(self) -> None:
        checks.counts(layers=self.layers, width=self.width, element_bytes=self.element_bytes)

    @property
    def parameters(self) -> int:
        """φ: the model's parameters without embeddings."""
        return 12 * self.layers * self.width**2


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of N GPUs alike."""

    gpus: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    peak_flops: float

    def __post_init__(self) -> None:
        checks.counts(gpus=self.gpus)
        checks.positive(
            memory_bytes=self.memory_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            peak_flops=self.peak_flops,
        )


@dataclass(frozen=True)
class Estimate:
    """What the closed form says of one step of each GPU."""

    tokens: float
    #: TGS: tokens per GPU and second.
    tokens_per_gpu_s: float
    mfu: float
    hfu: float


def free_bytes(shape: Shape, cluster: Cluster, stage: Stage = "zero-3") -> float:
    """M_free: bytes of a GPU beside parameters, gradients and optimizer states; may be negative."""
    parameters = shape.parameters * shape.element_bytes
    others = 7 * parameters  # gradients φQ, optimizer 6φQ: fp32 master copy and two moments
    if stage == "zero-3":
        return cluster.memory_bytes - (parameters + others) / cluster.gpus
    return cluster.memory_bytes - parameters - others / cluster.gpus


def activation_bytes_per_token(shape: Shape, gamma: float) -> float:
    """M_act: bytes of activations per token; a recomputed block keeps its input only.

    A block that keeps all has 16·H·Q + 2·H bytes. Raises ``ValueError`` for a ``gamma`` that is no
    share.
    """
    checks.share(gamma=gamma)
    kept = 16 * shape.width * shape.element_bytes + 2 * shape.width
    return shape.layers * ((1 - gamma) * shape.width * shape.element_bytes + gamma * kept)


def token_capacity(
    shape: Shape, cluster: Cluster, gamma: float = 0.0, stage: Stage = "zero-3"
) -> float:
    """E: tokens per GPU that fill its memory; negative where the states alone do not fit."""
    return free_bytes(shape, cluster, stage) / activation_bytes_per_token(shape, gamma)


def forward_flops_per_token(shape: Shape, sequence_length: int) -> float:
    """F_fwd: forward's operations per token, 2φ and the attention's 4·L·H·l."""
    return 2.0 * shape.parameters + 4.0 * shape.layers * shape.width * sequence_length


def transfer_seconds(shape: Shape, cluster: Cluster) -> float:
    """T_transfer: seconds of one gather of all parameters."""
    return shape.parameters * shape.element_bytes / cluster.bandwidth_bytes_per_s


def estimate(
    shape: Shape,
    cluster: Cluster,
    sequence_length: int,
    *,
    gamma: float = 0.0,
    efficiency: float = 1.0,
    stage: Stage = "zero-3",
) -> Estimate | None:
    """The step that fills the memory; ``None`` if not even one sequence fits.

    Raises ``ValueError`` naming the argument that cannot be.
    """
    checks.counts(sequence_length=sequence_length)
    checks.positive(efficiency=efficiency)
    checks.share(efficiency=efficiency)
    tokens = token_capacity(shape, cluster, gamma, stage)
    if tokens < sequence_length:
        return None
    forward = forward_flops_per_token(shape, sequence_length)
    transfer = transfer_seconds(shape, cluster)
    rate = efficiency * cluster.peak_flops
    return _step(cluster, tokens, gamma, forward, rate, transfer)


def _step(
    cluster: Cluster,
    tokens: float,
    gamma: float,
    forward: float,
    rate: float,
    transfer: float,
) -> Estimate:
    """The step of so many tokens at ``rate``, from one token's forward and one gather of all."""
    backward = (2 + (1 - gamma)) * forward
    forward_seconds = max(tokens * forward / rate, transfer)
    backward_seconds = max(tokens * backward / rate, transfer)
    speed = tokens / (forward_seconds + backward_seconds)
    return Estimate(
        tokens,
        speed,
        mfu=3 * forward * speed / cluster.peak_flops,
        hfu=(forward + backward) * speed / cluster.peak_flops,
    )


def hfu_bound(shape: Shape, cluster: Cluster, sequence_length: int) -> float:
    """The most HFU that memory and bandwidth allow, with full checkpointing; may exceed 1.

    (2 + l/(3H)) / (L·H·Q²) · M_free·S_vol / S_F: the product of free memory and bandwidth counts.
    """
    return (
        _intensity(shape, sequence_length)
        * free_bytes(shape, cluster)
        * cluster.bandwidth_bytes_per_s
        / cluster.peak_flops
    )


def required_bandwidth_bytes_per_s(
    shape: Shape, cluster: Cluster, sequence_length: int, target: float
) -> float:
    """S_vol: bytes per second and GPU for an HFU of ``target``, the inverse of ``hfu_bound``.

    Raises ``ValueError`` for a target that is not a share, and where the model leaves no memory.
    """
    checks.positive(target=target)
    checks.share(target=target)
    free = free_bytes(shape, cluster)
    if free <= 0:
        raise ValueError(
            f"gpus = {cluster.gpus}: parameters, gradients and optimizer states need "
            f"{(cluster.memory_bytes - free) / 1e9:.1f} GB per GPU, "
            f"it has {cluster.memory_bytes / 1e9:.1f}"
        )
    return target * cluster.peak_flops / (_intensity(shape, sequence_length) * free)


def _intensity(shape: Shape, sequence_length: int) -> float:
    checks.counts(sequence_length=sequence_length)
    per_layer = shape.layers * shape.width * shape.element_bytes**2
    return (2 + sequence_length / (3 * shape.width)) / per_layer


@dataclass(frozen=True)
class Choice:
    """A point of the grid, and its estimate."""

    stage: Stage
    gamma: float
    efficiency: float
    estimate: Estimate


@dataclass(frozen=True)
class Best:
    """The best points of a grid; ``None`` where no point is feasible."""

    mfu: Choice | None
    tokens_per_gpu_s: Choice | None


def grid_search(
    shape: Shape,
    cluster: Cluster,
    sequence_length: int,
    *,
    steps: int = 100,
    highest_efficiency: float = 1.0,
) -> Best:
    """Search stage × γ × α̂ in ``steps`` steps each, as in 5.4.

    A point counts if its HFU is at most its α̂. Raises ``ValueError`` naming the argument that
    cannot be.
    """
    checks.counts(steps=steps, sequence_length=sequence_length)
    checks.share(highest_efficiency=highest_efficiency)
    forward = forward_flops_per_token(shape, sequence_length)
    transfer = transfer_seconds(shape, cluster)
    choices = []
    stages: tuple[Stage, ...] = ("zero-1/2", "zero-3")
    for stage in stages:
        for kept in range(steps + 1):
            gamma = kept / steps
            tokens = token_capacity(shape, cluster, gamma, stage)
            if tokens < sequence_length:
                continue
            for reached in range(1, steps + 1):
                efficiency = highest_efficiency * reached / steps
                if efficiency == 0:
                    continue
                rate = efficiency * cluster.peak_flops
                found = _step(cluster, tokens, gamma, forward, rate, transfer)
                # Equal but for rounding where the step is bound by compute alone.
                if found.hfu <= efficiency * (1 + 1e-9):
                    choices.append(Choice(stage, gamma, efficiency, found))
    if not choices:
        return Best(None, None)
    return Best(
        max(choices, key=lambda choice: choice.estimate.mfu),
        max(choices, key=lambda choice: choice.estimate.tokens_per_gpu_s),
    )


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
    shape = Shape(layers=point.layers, width=point.width)
    cluster = Cluster(
        gpus=point.gpus,
        memory_bytes=point.memory_bytes,
        bandwidth_bytes_per_s=point.bandwidth_bits_per_s / 8,
        peak_flops=point.peak_flops,
    )
    length = point.sequence_length
    best = grid_search(shape, cluster, length).mfu
    assert best is not None, "all of the paper's models fit"
    required = required_bandwidth_bytes_per_s(shape, cluster, length, target=1.0)
    return BoundRecord(
        point=point,
        parameters=shape.parameters,
        free_bytes=free_bytes(shape, cluster),
        tokens=token_capacity(shape, cluster),
        hfu_bound=hfu_bound(shape, cluster, length),
        required_bits_per_s=8 * required,
        best_mfu=best.estimate.mfu,
        gains=_gains(shape, cluster, length),
        commit=commit,
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _gains(shape: Shape, cluster: Cluster, length: int) -> Gains:
    bandwidth, memory = cluster.bandwidth_bytes_per_s, cluster.memory_bytes
    faster = replace(cluster, bandwidth_bytes_per_s=2 * bandwidth)
    larger = replace(cluster, memory_bytes=memory + free_bytes(shape, cluster))
    usual = hfu_bound(shape, cluster, length)
    steps = [estimate(shape, cluster, tokens) for tokens in (length, _LONGER * length)]
    short, long = (step.tokens_per_gpu_s for step in steps if step is not None)
    return Gains(
        twice_bandwidth=hfu_bound(shape, faster, length) / usual,
        twice_free_memory=hfu_bound(shape, larger, length) / usual,
        longer_sequences=hfu_bound(shape, cluster, _LONGER * length) / usual,
        longer_sequences_tokens_per_s=long / short,
    )

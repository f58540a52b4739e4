"""The bound that memory and bandwidth set to FSDP's utilisation, at the paper's model sizes.

"Memory and Bandwidth are All You Need for FSDP" (arXiv 2504.03655). The formulas are papers.md 5.2
to 5.4, whose label is [R]: recalled and made consistent, not read in the paper. Symbols are the
paper's: φ = 12·L·H² parameters, Q bytes per element, N GPUs, l tokens per sequence, E tokens per
GPU and step, γ the share of intermediate activations that is kept (0: full checkpointing), α̂ the
share of the peak that kernels reach. The answers of a point are one line of ``bound.jsonl``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from simulation import checks, files
from simulation.files import Strict, now
from simulation.hardware import Gpu, gpu

#: Sharded state: optimizer states and gradients (ZeRO-1/2), or parameters too (ZeRO-3).
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
#: Sizes that the committed records have.
_RECORDED = (1.3, 7, 13, 66, 175, 310)
GPU = "a100-40gb"
_BITS_PER_S = (100e9, 200e9)
SEQUENCE_LENGTH, _LONGER = 2048, 4
#: Q: bytes of a bf16 element.
_BYTES = 2


@dataclass(frozen=True)
class Estimate:
    """The closed form's answer for one step of each GPU, where kernels reach ``efficiency``."""

    efficiency: float
    #: TGS: tokens per GPU and second.
    tokens_per_gpu_s: float
    mfu: float
    hfu: float


class Point(Strict):
    """A model of L layers of width H on N equal GPUs, trained on sequences of one length."""

    #: The paper's name for the size, and the parameters that it stands for.
    model: str
    named_parameters: float
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    gpus: int = Field(ge=1)
    memory_bytes: float = Field(gt=0)
    bandwidth_bits_per_s: float = Field(gt=0)
    peak_flops: float = Field(gt=0)
    sequence_length: int = Field(ge=1)

    @property
    def parameters(self) -> int:
        """φ: the model's parameters without embeddings."""
        return 12 * self.layers * self.width**2

    @property
    def forward_flops(self) -> float:
        """F_fwd: forward's operations per token, 2φ and the attention's 4·L·H·l."""
        return 2.0 * self.parameters + 4.0 * self.layers * self.width * self.sequence_length

    @property
    def transfer_seconds(self) -> float:
        """T_transfer: seconds of one gather of all parameters."""
        return self.parameters * _BYTES / (self.bandwidth_bits_per_s / 8)

    def free_bytes(self, stage: Stage = "zero-3") -> float:
        """M_free: bytes that model and optimizer states leave of a GPU; may be negative."""
        parameters = self.parameters * _BYTES
        others = 7 * parameters  # gradients φQ, optimizer 6φQ: fp32 master copy and two moments
        if stage == "zero-3":
            return self.memory_bytes - (parameters + others) / self.gpus
        return self.memory_bytes - parameters - others / self.gpus

    def tokens(self, gamma: float = 0.0, stage: Stage = "zero-3") -> float:
        """E: tokens per GPU that fill its memory; negative where the states alone do not fit.

        M_act: a block that keeps all has 16·H·Q + 2·H bytes per token, a recomputed one its input.
        """
        intermediate = 16 * self.width * _BYTES + 2 * self.width
        activations = self.layers * ((1 - gamma) * self.width * _BYTES + gamma * intermediate)
        return self.free_bytes(stage) / activations

    @property
    def _intensity(self) -> float:
        per_layer = self.layers * self.width * _BYTES**2
        return (2 + self.sequence_length / (3 * self.width)) / per_layer

    @property
    def hfu_bound(self) -> float:
        """The most HFU that memory and bandwidth allow, with full checkpointing; may exceed 1.

        (2 + l/(3H)) / (L·H·Q²) · M_free·S_vol / S_F: free memory times bandwidth counts.
        """
        bandwidth = self.bandwidth_bits_per_s / 8
        return self._intensity * self.free_bytes() * bandwidth / self.peak_flops

    def required_bandwidth_bytes_per_s(self, target: float) -> float:
        """S_vol: bytes per second and GPU for an HFU of ``target``, the inverse of ``hfu_bound``.

        Raises ``ValueError`` for a target outside of (0, 1], and where the model leaves no memory.
        """
        checks.positive(target=target)
        checks.share(target=target)
        free = self.free_bytes()
        if free <= 0:
            raise ValueError(
                f"gpus = {self.gpus}: parameters, gradients and optimizer states need "
                f"{(self.memory_bytes - free) / 1e9:.1f} GB per GPU, "
                f"it has {self.memory_bytes / 1e9:.1f}"
            )
        return target * self.peak_flops / (self._intensity * free)

    def estimate(
        self, gamma: float = 0.0, efficiency: float = 1.0, stage: Stage = "zero-3"
    ) -> Estimate | None:
        """The step that fills the memory; ``None`` if not even one sequence fits.

        Raises ``ValueError`` for shares that are not between 0 and 1.
        """
        checks.positive(efficiency=efficiency)
        checks.share(gamma=gamma, efficiency=efficiency)
        tokens = self.tokens(gamma, stage)
        if tokens < self.sequence_length:
            return None
        forward, rate = self.forward_flops, efficiency * self.peak_flops
        backward = (2 + (1 - gamma)) * forward
        seconds = max(tokens * forward / rate, self.transfer_seconds) + max(
            tokens * backward / rate, self.transfer_seconds
        )
        speed = tokens / seconds
        return Estimate(
            efficiency,
            speed,
            mfu=3 * forward * speed / self.peak_flops,
            hfu=(forward + backward) * speed / self.peak_flops,
        )

    def grid(self, steps: int = 100, highest_efficiency: float = 1.0) -> Iterator[Estimate]:
        """Search stage × γ × α̂ in ``steps`` steps each, as in 5.4.

        A point counts if its HFU is at most its α̂.
        """
        for stage, i, j in product(get_args(Stage), range(steps + 1), range(1, steps + 1)):
            efficiency = highest_efficiency * j / steps
            estimate = self.estimate(i / steps, efficiency, stage)
            # Equal but for rounding where the step is bound by compute alone.
            if estimate is not None and estimate.hfu <= efficiency * (1 + 1e-9):
                yield estimate


class Gains(Strict):
    """Factors by which the bound on utilisation grows, each by one change alone."""

    twice_bandwidth: float
    #: Twice what parameters, gradients and optimizer states leave of the GPU's memory.
    twice_free_memory: float
    #: Sequences of four times as many tokens; and the factor of tokens per second.
    longer_sequences: float
    longer_sequences_tokens_per_s: float


class BoundRecord(Strict):
    """The answers for one point; activations are recomputed, except in ``best_mfu``."""

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


def points_on(device: Gpu, bits_per_s: float) -> list[Point]:
    """All sizes on GPUs of this kind, each with a bandwidth of ``bits_per_s``."""
    return [
        Point(
            model=f"{billions:g}B",
            named_parameters=billions * 1e9,
            layers=layers,
            width=width,
            gpus=gpus,
            memory_bytes=device.memory_bytes,
            bandwidth_bits_per_s=bits_per_s,
            peak_flops=device.peak_flops,
            sequence_length=SEQUENCE_LENGTH,
        )
        for billions, layers, width, gpus in MODELS
    ]


def points() -> list[Point]:
    """The paper's sizes, each at its two bandwidths."""
    by_bandwidth = zip(*(points_on(gpu(GPU), bits) for bits in _BITS_PER_S), strict=True)
    recorded = [billions * 1e9 for billions in _RECORDED]
    return [p for pair in by_bandwidth for p in pair if p.named_parameters in recorded]


def settle(point: Point, commit: str | None) -> BoundRecord:
    """Answer a point by the closed form; ``commit`` is the one that the record names."""
    faster, larger, longer = (
        point.model_copy(update=change)
        for change in (
            {"bandwidth_bits_per_s": 2 * point.bandwidth_bits_per_s},
            {"memory_bytes": point.memory_bytes + point.free_bytes()},
            {"sequence_length": _LONGER * point.sequence_length},
        )
    )
    short, long = point.estimate(), longer.estimate()
    assert short is not None, "all of the paper's models fit"
    assert long is not None, "with longer sequences too"
    return BoundRecord(
        point=point,
        parameters=point.parameters,
        free_bytes=point.free_bytes(),
        tokens=point.tokens(),
        hfu_bound=point.hfu_bound,
        required_bits_per_s=8 * point.required_bandwidth_bytes_per_s(target=1.0),
        best_mfu=max(estimate.mfu for estimate in point.grid()),
        gains=Gains(
            twice_bandwidth=faster.hfu_bound / point.hfu_bound,
            twice_free_memory=larger.hfu_bound / point.hfu_bound,
            longer_sequences=longer.hfu_bound / point.hfu_bound,
            longer_sequences_tokens_per_s=long.tokens_per_gpu_s / short.tokens_per_gpu_s,
        ),
        commit=commit,
        started_at=now(),
    )

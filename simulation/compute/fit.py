"""Rates of GPUs from published runs: three shares of each GPU's data sheet, and two numbers of all.

``results/compute/measured.csv`` has rows of the tables of mosaicml/llm-foundry,
scripts/train/benchmarking: GPU, shape, length, batch, checkpointing, tokens per second and GPU.

The time of a token is linear in the inverse shares, in the passes of exchanged bytes and in what is
lost with scale. Relative errors are minimised, large ones counted less: some published runs are
slower than their neighbours by a quarter, without a reason that the tables give.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from simulation.calibration import not_negative
from simulation.files import Strict, problem
from simulation.hardware import Gpu, Hardware, Rates, card, cluster, scale
from simulation.step.passes import ADAM_BYTES
from simulation.transformer import Transformer
from simulation.work import token_work
from simulation.workload import Workload

ROWS = Path(__file__).parents[2] / "results" / "compute" / "measured.csv"
#: Words of the tokenizer that its models are made for.
_VOCABULARY = 50_368
_GPUS_PER_NODE = 8
#: Rounds in which weights are found, and the error below which all count alike.
_ROUNDS, _SMALL = 20, 0.01
#: Exchanges of all parameters per micro-batch: gathers of forward and backward, one reduction.
_EXCHANGES = 3
PARTS = ("products", "attention", "bytes")


class Row(Strict):
    """A line of the file."""

    gpu: str
    model: str
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    gpus: int = Field(ge=1)
    sequence_length: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    precision: str
    sharding: str
    activation_checkpointing: bool
    activation_cpu_offload: bool
    mfu_percent: float
    hfu_percent: float
    tokens_per_s_per_gpu: float = Field(gt=0)

    @property
    def bf16(self) -> bool:
        """Whether its matrix products are in bf16, as all that is predicted here."""
        return "bf16" in self.precision


@dataclass(frozen=True)
class Run:
    """A row as the simulator sees it."""

    row: Row
    workload: Workload
    #: The cluster by its data sheets.
    hardware: Hardware


def read_rows(path: Path = ROWS) -> list[Row]:
    """Read a file of rows. Raises ``ValueError`` with the file and the line."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = []
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(Row.model_validate(line))
            except ValidationError as error:
                raise ValueError(f"{path}:{number}: {problem(error)}") from error
    return rows


def run_of(row: Row) -> Run:
    """The row's workload and cluster; fused kernels, FSDP over all GPUs.

    Raises ``ValueError`` for a GPU that is not known, and for GPUs that fill no nodes of eight.
    """
    nodes, rest = divmod(row.gpus, min(row.gpus, _GPUS_PER_NODE))
    if rest:
        raise ValueError(f"gpus = {row.gpus}: must be a multiple of {_GPUS_PER_NODE} above it")
    model = Transformer(
        name=row.model,
        family="gpt2",
        layers=row.layers,
        width=row.width,
        heads=row.heads,
        vocabulary=_VOCABULARY,
        mlp_width=4 * row.width,
        key_value_heads=row.heads,
        tied=True,
    )
    workload = Workload(
        strategy="fsdp2",
        model=model,
        sequence_length=row.sequence_length,
        micro_batch=row.micro_batch,
        accumulation=max(1, row.global_batch // (row.gpus * row.micro_batch)),
        recomputed=float(row.activation_checkpointing),
        kernels="fused",
    )
    hardware = cluster(
        row.gpu,
        nodes=nodes,
        ranks_per_node=min(row.gpus, _GPUS_PER_NODE),
        inter_bits_per_s=card(row.gpu).node_bits_per_s,
    )
    return Run(row, workload, hardware)


@dataclass(frozen=True)
class Shares:
    """Shares of a GPU's data sheet that are reached: of the peak, and of the memory's rate."""

    products: float
    #: Of the peak, by the operations of causal attention.
    attention: float
    bytes: float


@dataclass(frozen=True)
class Fitted:
    """What was fitted: shares by GPU, and what all GPUs have in common."""

    shares: Mapping[str, Shares]
    #: Passes through memory, at its full rate, of each byte that is gathered or reduced.
    exchange_passes: float
    lost_with_scale: float

    def rates(self, device: Gpu, measured: str) -> Rates:
        """The rates of ``device`` by the shares of the GPU that was ``measured``."""
        shares = self.shares[measured]
        nbytes = shares.bytes * device.memory_bytes_per_s
        return Rates(
            products_per_s=shares.products * device.peak_flops,
            attention_per_s=shares.attention * device.peak_flops,
            bytes_per_s=nbytes,
            copied_bytes_per_s=nbytes,
            exchanged_bytes_per_s=_rate(device, self.exchange_passes),
            lost_with_scale=self.lost_with_scale,
            basis="fitted" if measured == device.name else "nearest architecture",
            measured_on=measured,
        )

    def numbers(self) -> dict[str, float]:
        """All constants by name, such as ``h100-sxm products``."""
        found = {
            f"{gpu} {part}": float(getattr(shares, part))
            for gpu, shares in self.shares.items()
            for part in PARTS
        }
        found["exchange passes"] = self.exchange_passes
        found["lost with scale"] = self.lost_with_scale
        return found


def fit(runs: Sequence[Run]) -> Fitted:
    """Fit the constants. Raises ``ValueError`` where there are too few runs for them.

    What a GPU's rows do not tell apart, as few do that are of one size, is the others' mean.
    """
    gpus = sorted({run.row.gpu for run in runs})
    count = len(PARTS) * len(gpus) + 2
    if len(runs) < count:
        raise ValueError(f"rows: {len(runs)} were given, {count} constants need as many at least")
    features = np.array([_features(run, gpus) for run in runs])
    target = np.array([1 - _optimizer_share(run) for run in runs])
    #: How constants follow from those that are fitted.
    mean = np.eye(count)
    while True:
        found = mean @ np.array(_robust(features @ mean, target))
        untold = [at for at in range(count - 2) if found[at] <= 0]
        if not untold:
            break
        for at in untold:
            others = [
                other
                for other in range(at % len(PARTS), count - 2, len(PARTS))
                if other not in untold and mean[other, other]
            ]
            if not others:
                gpu, part = gpus[at // len(PARTS)], PARTS[at % len(PARTS)]
                raise ValueError(f"rows of {gpu}: do not tell {part} from the rest")
            mean[at] = 0
            mean[at, others] = 1 / len(others)
    passes, lost = (float(value) for value in found[-2:])
    shares = {
        gpu: Shares(*(1 / float(value) for value in found[len(PARTS) * index :][: len(PARTS)]))
        for index, gpu in enumerate(gpus)
    }
    return Fitted(shares, passes, lost)


def _rate(device: Gpu, passes: float) -> float:
    return device.memory_bytes_per_s / passes if passes else float("inf")


def _features(run: Run, gpus: Sequence[str]) -> list[float]:
    """Each constant's factor in the measured time, relative to it."""
    device, work, row = run.hardware.device, token_work(run.workload), run.row
    measured = 1 / row.tokens_per_s_per_gpu
    own = [
        work.products / device.peak_flops,
        work.attention / device.peak_flops,
        work.nbytes / device.memory_bytes_per_s,
    ]
    columns = [0.0] * (len(PARTS) * len(gpus))
    at = len(PARTS) * gpus.index(row.gpu)
    columns[at : at + len(PARTS)] = [value / measured for value in own]
    element, tokens = run.workload.element_bytes, run.workload.tokens
    exchanged = _EXCHANGES * element * run.workload.parameters / tokens
    columns.append(exchanged / device.memory_bytes_per_s / measured)
    columns.append(scale(run.hardware.nodes))
    return columns


def _optimizer_share(run: Run) -> float:
    """Share of the measured time that the optimizer's step takes by the data sheet."""
    workload, world = run.workload, run.hardware.world_size
    seconds = ADAM_BYTES * workload.trained / world / run.hardware.device.memory_bytes_per_s
    tokens = workload.tokens * workload.accumulation
    return seconds / tokens * run.row.tokens_per_s_per_gpu


def _robust(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Fit with weights that fall with the error, which is close to the least sum of errors."""
    weights = np.ones(len(target))
    for _ in range(_ROUNDS):
        found = not_negative(features * weights[:, None], target * weights)
        errors = np.abs(features @ np.array(found) - target)
        weights = 1 / np.sqrt(np.maximum(errors, _SMALL))
    return found

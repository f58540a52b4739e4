"""Rates of GPUs from published runs: shares of their data sheets, within what is possible.

``results/compute/measured.csv`` has what public sources say of a run: where and when, GPU, network,
model, strategy, batch, kernels and tokens per second and GPU; ``run_of`` is a row as the simulator
sees it.

A card has a share of its peak in matrix products; an architecture has one of the peak in attention
and one of the memory's rate; costs of kernel launches, of exchanged bytes and of scale are common
to all. The time of a token is linear in the inverse shares and in these three, which
``simulation.calibration`` fits.

Whole sources are left out and predicted by the fit to the others: their errors are the range that
plans print. A GPU has the rates of its own rows, or those of the GPU whose architecture is nearest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import Field

from simulation.files import Strict, rows_of, validated
from simulation.hardware import Gpu, Hardware, Rates, Work, card, cluster
from simulation.models import shape
from simulation.transformer import ModelSpec, Targets, Transformer
from simulation.workload import (
    Attention,
    FrozenDtype,
    Kernels,
    Recomputed,
    States,
    Workload,
    checkpointed,
)

_RESULTS = Path(__file__).parents[1] / "results" / "compute"
ROWS, RECORD = _RESULTS / "measured.csv", _RESULTS / "fit.json"
#: Microseconds from a kernel to the next.
LAUNCH = "kernel microseconds"
PASSES, LOST = "exchange passes", "lost with scale"
#: Least share of the prediction that is thought possible of cards without a rack's power: they do
#: not hold the clocks of their data sheets in matrix products. Ours.
_LEAST_OF_CARDS = 0.55
#: Names of the checks that ranges are from.
SOURCES, ARCHITECTURES = "each source", "each architecture"
#: Vocabulary of the tokenizer that llm-foundry's models are made for.
_VOCABULARY = 50_368


class Row(Strict):
    """A line of the file: what ran where, as its source says it."""

    source: str = "given"
    date: str = ""
    framework: str = ""
    gpu: str
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    #: A node's bandwidth, by its data sheet or as it was measured, and its network.
    gbit_s: float = Field(gt=0)
    net_kind: Literal["nominal", "measured"] = "nominal"
    fabric: str = "unknown"
    #: A name that plans know, or of a GPT of the shape that follows.
    model: str
    layers: int | None = Field(default=None, ge=1)
    width: int | None = Field(default=None, ge=1)
    heads: int | None = Field(default=None, ge=1)
    strategy: str = "fsdp2"
    tuning: Literal["full", "lora"] = "full"
    frozen: FrozenDtype = "bf16"
    targets: Targets = "attention"
    rank: int = Field(default=8, ge=1)
    length: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    accumulation: int = Field(default=1, ge=1)
    recomputed: Recomputed = 0.0
    kernels: Kernels = "flash"
    attention: Attention = "flash-2"
    states: States = "fp32"
    precision: str = "bf16"
    tokens_per_s_per_gpu: float = Field(gt=0)
    note: str = ""

    @property
    def bf16(self) -> bool:
        """Whether its matrix products are in bf16, and not in fp8."""
        return "bf16" in self.precision

    def shape(self) -> Transformer:
        """The model. Raises ``ValueError`` for a name that is not known, where no shape follows."""
        if self.layers is None or self.width is None or self.heads is None:
            return shape(self.model, self.length)
        spec = ModelSpec(
            name=self.model,
            family="gpt2",
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            vocabulary=_VOCABULARY,
        )
        return Transformer.of(spec, 0)


@dataclass(frozen=True)
class Run:
    """A row as the simulator sees it."""

    row: Row
    workload: Workload
    #: The cluster by its data sheets.
    hardware: Hardware


def read_rows(path: Path = ROWS) -> list[Row]:
    """Read a file of rows. Raises ``ValueError`` with the file and the line."""
    return [validated(Row, values, where) for where, values in rows_of(path)]


def run_of(row: Row) -> Run:
    """The row's workload and cluster. Raises ``ValueError`` for an unknown GPU or model."""
    model = row.shape()
    workload = Workload(
        strategy=row.strategy,
        model=model,
        lora=model.lora(row.rank, row.targets) if row.tuning == "lora" else None,
        sequence_length=row.length,
        micro_batch=row.micro_batch,
        accumulation=row.accumulation,
        **checkpointed(row.recomputed),
        kernels=row.kernels,
        attention=row.attention,
        frozen_dtype=row.frozen,
        states=row.states,
        product_dtype="bf16" if row.bf16 else "fp8",
    )
    hardware = cluster(
        row.gpu,
        nodes=row.nodes,
        ranks_per_node=row.gpus_per_node,
        inter_bits_per_s=1e9 * row.gbit_s,
    ).over(row.fabric, 1)
    if row.net_kind == "measured":
        hardware = hardware.with_inter_bandwidth(1e9 * row.gbit_s)
    return Run(row, workload, hardware)


#: Fitted constants by name, such as ``h100-sxm products`` and ``h100 attention``.
Fitted = Mapping[str, float]


def rates_by(fitted: Fitted, device: Gpu) -> Rates:
    """The rates of a GPU by its own shares, or by those of the nearest that had rows."""
    name = device.name
    known = [name.split()[0] for name in fitted if name.endswith(" products")]
    alike = (gpu for gpu in known if architecture(gpu) == architecture(name))
    nearest = (name, card(name).like, *alike, *known)
    measured = next(gpu for gpu in nearest if gpu in known)
    products, attention, share = (fitted[name] for name in shares(measured))
    nbytes = share * device.memory_bytes_per_s
    passes = fitted[PASSES]
    return Rates(
        products_per_s=products * device.peak_flops,
        attention_per_s=attention * device.peak_flops,
        bytes_per_s=nbytes,
        copied_bytes_per_s=nbytes,
        exchanged_bytes_per_s=device.memory_bytes_per_s / passes if passes else inf,
        kernel_seconds=fitted[LAUNCH] / 1e6,
        lost_with_scale=fitted[LOST],
        basis="fitted" if measured == device.name else "nearest architecture",
        measured_on=measured,
    )


def architecture(gpu: str) -> str:
    """The part of its name that cards of one architecture have in common."""
    return gpu.split("-")[0]


def shares(gpu: str) -> tuple[str, str, str]:
    """Names of the shares of a GPU."""
    kind = architecture(gpu)
    return f"{gpu} products", f"{kind} attention", f"{kind} bytes"


class Constant(Strict):
    """A constant, and where it lies in nine of ten draws of the bootstrap."""

    name: str
    value: float
    low: float
    high: float


class Check(Strict):
    """Relative errors of tokens per second, of rows that the fit had not seen, or of all."""

    what: str
    rows: int
    #: Median of the absolute errors, what nine of ten are within, and the largest.
    median: float
    nine_of_ten: float
    worst: float
    #: Ratios of measured to predicted between which nine of ten lie.
    lowest: float
    highest: float


class Predicted(Strict):
    """A row's measured and predicted tokens per second and GPU."""

    row: Row
    fitted: float
    #: By the fit to all other sources.
    held_out: float


class ComputeRecord(Strict):
    """All that was fitted, and how well it predicts."""

    evidence: Literal["simulated"] = "simulated"
    constants: list[Constant]
    checks: list[Check]
    predictions: list[Predicted]
    commit: str | None
    started_at: str

    def fitted(self) -> Fitted:
        """The constants as the fit has them."""
        return {constant.name: constant.value for constant in self.constants}

    def check(self, what: str) -> Check:
        """The check of this name."""
        return next(check for check in self.checks if check.what == what)


@cache
def read() -> ComputeRecord:
    """The committed fit."""
    return ComputeRecord.model_validate_json(RECORD.read_bytes())


def rates_of(device: Gpu) -> Rates:
    """The rates of the GPU, with their range and what they rest on; raises as ``card``."""
    known = read()
    rates = rates_by(known.fitted(), device)
    if rates.basis == "fitted":
        check = known.check(SOURCES)
        return replace(rates, lowest=check.lowest, highest=check.highest)
    check = known.check(ARCHITECTURES)
    lowest = min(check.lowest, _LEAST_OF_CARDS) if device.link_is_pcie else check.lowest
    return replace(rates, lowest=lowest, highest=check.highest)


def by_block(device: Gpu, work: Work, seconds: float) -> Rates:
    """The GPU's rates where one transformer block, of this work, was measured.

    All parts are faster or slower than fitted by one factor. The range that is left is that of
    sources that the fit had not seen.
    """
    check, rates = read().check(SOURCES), rates_of(device)
    times = rates.seconds(work) / seconds
    measured = rates.faster(times, times, "preflight's block")
    return replace(measured, lowest=check.lowest, highest=check.highest)


def with_rates(hardware: Hardware) -> Hardware:
    """The same cluster, whose GPUs compute at fitted rates."""
    return replace(hardware, rates=rates_of(hardware.device))

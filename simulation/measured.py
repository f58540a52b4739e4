"""Published measurements of training: one table of them, and each as the simulator sees it.

``results/compute/measured.csv`` has what public sources say of a run: where and when, GPU, network,
model, strategy, batch, kernels and tokens per second and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from simulation.files import Strict, rows_of, validated
from simulation.hardware import Hardware, cluster
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

ROWS = Path(__file__).parents[1] / "results" / "compute" / "measured.csv"
#: Words of the tokenizer that llm-foundry's models are made for.
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
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

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
    """The row's workload and cluster. Raises ``ValueError`` for a GPU or a model unknown."""
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

"""Published measurements of fully sharded training, as workloads on hardware.

``results/compute/measured.csv`` has rows of the tables of mosaicml/llm-foundry,
scripts/train/benchmarking: GPU, shape, length, batch, checkpointing, tokens per second and GPU.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field, ValidationError

from simulation.files import Strict
from simulation.hardware import Hardware, cluster
from simulation.rates import Rates
from simulation.transformer import Transformer
from simulation.workload import Workload

ROWS = Path(__file__).parents[2] / "results" / "compute" / "measured.csv"
#: Words of the tokenizer that its models are made for.
_VOCABULARY = 50_368
_GPUS_PER_NODE = 8
#: Nominal bandwidth of a node, by GPU: as such nodes usually have it, for the tables do not say.
_INTER_BITS_PER_S = {"h100-sxm": 3.2e12}
_USUAL_BITS_PER_S = 1.6e12
#: Micro-batches that are simulated of a row that has more: each one more is like the last.
_MOST_ACCUMULATION = 3


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
    #: The cluster by its data sheets; ``on`` has it with rates.
    hardware: Hardware

    @property
    def tokens_per_s(self) -> float:
        """Measured tokens per second of all GPUs."""
        return self.row.tokens_per_s_per_gpu * self.row.gpus

    def on(self, rates: Rates) -> Hardware:
        """The cluster whose GPUs compute at these rates."""
        return replace(self.hardware, rates=rates)


def read(path: Path = ROWS) -> list[Row]:
    """Read a file of rows. Raises ``ValueError`` with the file and the line."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = []
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(Row.model_validate(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise ValueError(f"{path}:{number}: {where}: {first['msg']}") from error
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
        inter_bits_per_s=_INTER_BITS_PER_S.get(row.gpu, _USUAL_BITS_PER_S),
    )
    return Run(row, workload, hardware)

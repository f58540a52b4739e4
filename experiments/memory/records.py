"""What is asked about memory and what was found: one line of ``memory.jsonl`` a case."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from experiments import records
from experiments.records import Cell, ClusterSpec, ModelSpec, Name, Strict, Tuning

State = Literal["ok", "oom", "skipped", "failed"]


class Case(Strict):
    """One strategy on one model: everything that decides how much memory a rank needs."""

    strategy: Name
    #: Cache policy of strategies that have one, as ``baselines.policies`` reads it.
    policy: str = "host"
    model: ModelSpec
    tuning: Tuning
    #: Whether each transformer block keeps its input only, and is computed again in backward.
    checkpointing: bool
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    lora_rank: int = Field(ge=1)
    #: Memory of one device, and what of it is left to the driver, NCCL and fragmentation.
    device_bytes: int = Field(gt=0)
    reserve_bytes: int = Field(ge=0)

    @property
    def usable_bytes(self) -> int:
        return self.device_bytes - self.reserve_bytes

    @property
    def label(self) -> str:
        """The strategy, with its policy where that is the case's choice."""
        return f"{self.strategy} {self.policy}" if self.strategy == "fcdp" else self.strategy

    @property
    def cell(self) -> Cell:
        """The same as a cell of a matrix, which is what models are built from."""
        return Cell(
            matrix="memory",
            strategy=self.strategy,
            model=self.model,
            tuning=self.tuning,
            cluster=ClusterSpec(nodes=self.nodes, ranks_per_node=self.ranks_per_node),
            inter_bandwidth_bits_per_s=None,
            sequence_length=self.sequence_length,
            micro_batch=1,
            accumulation=1,
            dtype="bfloat16",
            policy=self.policy,
            lora_rank=self.lora_rank,
            learning_rate=1e-4,
            warmup_steps=0,
            steps=1,
            timeout_s=1.0,
        )


class Peak(Strict):
    """Most bytes that one rank keeps alive during a step."""

    #: Sequences a rank.
    micro_batch: int
    device_bytes: int
    #: The host's part: the cache's arena, and what is offloaded.
    host_bytes: int


class Finding(Strict):
    """What the steps of one case took."""

    parameters: int
    trainable_parameters: int
    #: Between steps: parameters, optimizer states, caches.
    resting_device_bytes: int
    #: Each step that was run, by micro-batch.
    peaks: list[Peak] = Field(min_length=1)
    #: The largest that fits into what is usable; the next larger one was run and does not. 0 if
    #: not even one sequence does.
    largest_micro_batch: int
    #: The cache of all ranks of a node; ``None`` for strategies without one.
    host_cache_bytes_per_node: int | None


class MemoryRecord(Strict):
    """One case: what was found, or why nothing was."""

    case: Case
    state: State
    error: str | None
    evidence: Literal["simulated"] = "simulated"
    #: What of it is real.
    method: str = "real code, fake tensors"
    finding: Finding | None
    commit: str | None
    versions: dict[str, str]
    started_at: str
    seconds: float


def read(path: Path) -> list[MemoryRecord]:
    """Read ``memory.jsonl``; a torn last line is dropped. Raises ``ValueError`` with the line."""
    return records.read_as(path, MemoryRecord)

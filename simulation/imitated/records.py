"""The study's cases and the memory that they take: one line of ``memory.jsonl`` per case."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from baselines.registry import find
from fcdp.grouping import PartialsChoice
from simulation import files
from simulation.files import Name, Strict
from simulation.transformer import ModelSpec, Tuning

State = Literal["ok", "oom", "skipped", "failed"]


class Case(Strict):
    """A strategy on a model, with everything that decides how much memory a rank needs."""

    strategy: Name
    #: Cache policy of strategies that have one, as ``fcdp.cache.named`` reads it.
    policy: str = "host"
    model: ModelSpec
    tuning: Tuning
    #: Whether each transformer block keeps its input only, and is computed again in backward.
    checkpointing: bool
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    lora_rank: int = Field(ge=1)
    accumulation: int = Field(default=1, ge=1)
    #: Where FCDP's sums of micro-batches wait, as ``fcdp.CommOptions`` has it.
    partial_gradients: PartialsChoice = "device"
    #: Memory of one device, and its part for the driver, NCCL and fragmentation.
    device_bytes: int = Field(gt=0)
    reserve_bytes: int = Field(ge=0)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the case, for strategies that have such a choice."""
        return {"policy": self.policy, "partial_gradients": self.partial_gradients}

    @property
    def usable_bytes(self) -> int:
        """Device memory without the reserve."""
        return self.device_bytes - self.reserve_bytes

    @property
    def label(self) -> str:
        """The strategy, with its policy where that is the case's choice."""
        chooses = find(self.strategy).has_policy
        return f"{self.strategy} {self.policy}" if chooses else self.strategy


class Peak(Strict):
    """Most bytes that one rank keeps alive during a step."""

    #: Sequences per rank.
    micro_batch: int
    device_bytes: int
    #: The host's part: the cache's arena, and what is offloaded.
    host_bytes: int


class MemoryUse(Strict):
    """Memory that the steps of one case took, on one rank unless stated otherwise."""

    parameters: int
    trainable_parameters: int
    #: Bytes between steps: parameters, optimizer states, caches.
    resting_device_bytes: int
    #: The peaks of the steps that were run, in their order.
    peaks: list[Peak] = Field(min_length=1)
    #: The largest micro-batch that fits into what is usable; the next larger one was run and
    #: does not. 0 if not even one sequence does.
    largest_micro_batch: int
    #: Bytes of the caches of all ranks of a node; ``None`` for strategies without one.
    host_cache_bytes_per_node: int | None


class MemoryRecord(Strict):
    """A case with the memory that it takes, or the reason why that is not known."""

    case: Case
    state: State
    error: str | None
    evidence: Literal["simulated"] = "simulated"
    #: Part of it that is real.
    method: str = "real code, fake tensors"
    finding: MemoryUse | None
    commit: str | None
    versions: dict[str, str]
    started_at: str
    seconds: float


def read(path: Path) -> list[MemoryRecord]:
    """Read ``memory.jsonl``; a torn last line is dropped. Raises ``ValueError`` with the line."""
    return files.read_as(path, MemoryRecord)

"""What the closed form says of one model on one cluster: one line of ``bound.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from experiments import records
from experiments.records import Strict


class Point(Strict):
    """A model of L layers of width H on N GPUs alike, a sequence length."""

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
    """What a change of one thing alone multiplies the bound on utilisation by."""

    twice_bandwidth: float
    #: Twice what parameters, gradients and optimizer states leave of the GPU's memory.
    twice_free_memory: float
    #: Sequences of four times as many tokens; and what they multiply tokens a second by.
    longer_sequences: float
    longer_sequences_tokens_per_s: float


class BoundRecord(Strict):
    """One point, with all activations recomputed but where the best choice is looked for."""

    point: Point
    evidence: Literal["simulated"] = "simulated"
    #: 12·L·H².
    parameters: int
    free_bytes: float
    #: Tokens a GPU and step that fill its memory.
    tokens: float
    #: Bound on utilisation with recomputation, before the kernels' own; may exceed 1.
    hfu_bound: float
    #: Bandwidth a GPU that a bound of 1 needs.
    required_bits_per_s: float
    #: The most MFU over stages, kept activations and kernels' efficiency.
    best_mfu: float
    gains: Gains
    commit: str | None
    started_at: str


def read(path: Path) -> list[BoundRecord]:
    """Read ``bound.jsonl``. Raises ``ValueError`` with the line."""
    return records.read_as(path, BoundRecord)

"""The parts of a topology, of a unit and of a gather that tiers and policies look at."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from fcdp.cache.entry import Slice
from fcdp.streams import Streams


class NoFailures:
    """Of ranks that never fail, or of threads of one process, which fail together."""

    place = 0

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    completing = waiting

    def backward_runs(self, *_: Any, **__: Any) -> None: ...

    begins = forward_ends = announce = backward_runs

    def raise_out_of_step(self) -> None:
        raise AssertionError("ranks are out of step")


CPU = torch.device("cpu")
STREAMS = Streams(CPU)


@dataclass(frozen=True)
class Place:
    nodes: int
    node: int
    ranks_per_node: int = 1
    local_rank: int = 0
    rank: int = 0
    #: What process groups would be.
    intra: str = "intra"
    inter: str = "inter"
    reduce_intra: str = "intra of reductions"
    reduce_inter: str = "inter of reductions"
    failures: NoFailures = field(default_factory=NoFailures)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(eq=False)
class StandInUnit:
    name: str
    shard_bytes: int
    reuses: int = 1
    params: tuple[Any, ...] = ()
    hooked: bool = False


def slice_of(rows: torch.Tensor, node: int = 0) -> Slice:
    """One row per node, this rank's own among them."""
    return Slice(rows, node, STREAMS.current())

"""Parts of a model and its optimizer that a rank holds, for checkpoints: all, sharded, or some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer

from fcdp.engine import Engine, engine_of
from fcdp.topology import Topology

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """A model that FSDP2 shards, or one cut out of it that has its names; and its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    #: The engine of FCDP that caches it, if one does.
    engine: Engine | None = None


@dataclass(frozen=True)
class Held:
    """The parts of one model that this rank holds, such as its stages of a pipeline.

    A name means one tensor, whichever parts have it, such as an embedding that two stages tie:
    it is written once, and read by all that hold it.
    """

    parts: Sequence[Part]
    #: All ranks.
    topology: Topology
    #: Ranks that have all parts between them; ``None``: this rank has.
    group: dist.ProcessGroup | None = None

    @classmethod
    def whole(cls, model: nn.Module, optimizer: Optimizer) -> Held:
        """A cached model, which every rank holds a shard of.

        Raises ``ValueError`` if FCDP was not set up on it.
        """
        engine = engine_of(model)
        return cls([Part(model, optimizer, engine)], engine.topology)

    def gathered(self, own: _T) -> list[_T]:
        """List the values that ranks with parts of the model pass. Collective over ``group``."""
        if self.group is None:
            return [own]
        by_rank: list[Any] = [None] * self.group.size()
        dist.all_gather_object(by_rank, own, group=self.group)
        return by_rank

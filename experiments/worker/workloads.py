"""What a cell trains on: batches, and what is computed of a model on one.

A batch is one tensor. Strategies hand it on to the workload's loss, which alone knows its form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn as nn

from baselines.strategy import Loss, causal_loss
from experiments.records.cell import Cell
from experiments.records.workload import Images
from experiments.worker import configured, data, text
from fcdp import Topology


class Workload(Protocol):
    """A cell's data on one rank, and its loss."""

    #: What ``measure`` gives, in its order, by field of a measurement.
    metrics: Sequence[str]

    def batches(self) -> Iterator[torch.Tensor]:
        """This rank's micro-batches without end: a seed's are the same for all strategies."""
        ...

    def held_out(self) -> Iterator[torch.Tensor]:
        """The held-out examples in micro-batches, the same on all ranks; none if none are kept."""
        ...

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch, a scalar; calls the model once."""
        ...

    def measure(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Means over a held-out batch, one per metric; calls the model once."""
        ...


def of(cell: Cell, model: nn.Module, topology: Topology) -> Workload:
    """The cell's workload on this rank.

    Raises ``ValueError`` naming line and key for data that cannot be had or are not the model's.
    """
    if isinstance(cell.data, Images):
        from experiments.worker import images  # text needs none of it

        return images.ImageWorkload(cell, cell.data, topology.rank, topology.world_size)
    return TextWorkload(cell, model, topology.rank)


class TextWorkload:
    """Sequences drawn from one long text: int64 (sequences, tokens + 1)."""

    metrics: Sequence[str] = ("held_out_loss",)

    def __init__(self, cell: Cell, model: nn.Module, rank: int) -> None:
        found = text.tokens(cell, configured.vocabulary(model))
        self._training, self._held_out = text.split(found, cell)
        self._cell, self._rank = cell, rank
        self.loss = self.measure = _loss(cell)

    def batches(self) -> Iterator[torch.Tensor]:
        return data.micro_batches(
            self._training,
            rank=self._rank,
            seed=self._cell.seed,
            sequences=self._cell.micro_batch,
            sequence_length=self._cell.sequence_length,
        )

    def held_out(self) -> Iterator[torch.Tensor]:
        if len(self._held_out):
            yield from self._held_out.split(self._cell.micro_batch)


def _loss(cell: Cell) -> Loss:
    if cell.loss == Cell.model_fields["loss"].default:
        return causal_loss
    return configured.find_function(cell.loss, cell.origin.key("loss"))

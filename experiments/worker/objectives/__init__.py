"""Objectives: what a step computes before it updates, the same for all strategies.

A step is an iteration: without gradients an objective prepares micro-batches (it generates, and
scores with a frozen model), on which the strategy then steps as on any others, ``epochs`` times.
"""

from collections.abc import Sequence

import torch
import torch.nn as nn

from baselines.strategy import Trainable
from experiments.records import objective as specs
from experiments.records.cell import Cell
from experiments.worker.objectives import distillation, dpo, grpo, own
from experiments.worker.objectives.objective import Apply, Ended, Objective, Reference, Shard


def of(
    cell: Cell,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    rank: int,
    *,
    shard: Shard,
    apply: Apply,
) -> Objective | None:
    """The cell's objective on this rank; ``None`` where a step is a loss and no more.

    The model is not sharded yet; ``shard`` puts what is frozen beside it under its strategy, and
    ``apply`` calls it once it is.
    """
    match spec := cell.objective:
        case specs.CausalLM():
            return None
        case specs.DPO():
            return dpo.DPO(spec, Reference(cell, model, blocks, shard, apply))
        case specs.GRPO():
            reference = Reference(cell, model, blocks, shard, apply) if spec.beta else None
            return grpo.GRPO(spec, cell, reference, rank)
        case specs.Distillation():
            return distillation.Distillation(spec, cell, model, shard)
        case specs.OwnObjective():
            return own.Own(spec, cell)


def iterate(
    objective: Objective, trainable: Trainable, batches: Sequence[torch.Tensor], ended: Ended
) -> torch.Tensor:
    """Prepare the micro-batches and step on them; returns this rank's mean loss.

    ``ended`` is called with the name of each phase at its end.
    """
    model = trainable.model
    model.eval()
    with torch.no_grad(), trainable.without_gradients(), trainable.casting():
        prepared = objective.prepare(model, batches, ended)
    model.train()
    losses = [trainable.step(prepared) for _ in range(objective.epochs)]
    ended("update")
    return torch.stack(losses).mean()

"""Trainings beside FSDP2's, in float64: what differs then is no rounding."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining

import fcdp
from baselines.pipeline.train import Pipeline
from baselines.settings import PipelineSettings, Settings
from baselines.strategy import Trainable
from tests.baselines import training
from tests.baselines.training import Run


@dataclass(frozen=True)
class Result:
    """Losses of a rank, and on rank 0 all parameters by name."""

    losses: list[float]
    params: dict[str, Any]
    held_out: float
    #: Bytes of the last step, by the ledger, and those that were given to a neighbour to send.
    sent: dict[str, float]
    given: int
    closed_form: float
    #: Bytes of the last step that this rank has sent to others of its group of nodes.
    inside: dict[str, int]


def trained(run: Run, strategy: str, settings: Settings) -> Result:
    trainable, batches = run.made(strategy, settings)
    losses = [training.step(trainable, iter(batches)) for _ in range(run.steps - 1)]
    trainable.take_ledger()
    given: list[int] = []

    def count(operations: Any, **_: Any) -> None:
        given.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)

    with training.noting(torch.distributed.pipelining.schedules, "_batch_p2p", count):
        losses.append(training.step(trainable, iter(batches)))
    inside = inside_of(trainable)
    ledger = trainable.take_ledger() or {"inter_node": {}}
    params = whole(trainable)  # before an evaluation, after which FSDP2 leaves its root gathered
    held_out = trainable.evaluate(next(training.batches_of(7))).item()
    sent = ledger["inter_node"]
    return Result(losses, params, held_out, sent, sum(given), trainable.closed_form_bytes, inside)


def inside_of(trainable: Trainable) -> dict[str, int]:
    """Bytes by phase that FCDP has sent across nodes, inside of this rank's stages."""
    stages = trainable.stages if isinstance(trainable, Pipeline) else ()
    ledgers = [fcdp.ledger(stage).snapshot() for stage in stages if fcdp.is_cached(stage)]
    return dict(sum((Counter(each.get("inter_node", {})) for each in ledgers), Counter()))


def whole(trainable: Trainable) -> dict[str, Any]:
    """All parameters, as arrays, by the model's own names."""
    if isinstance(trainable, Pipeline):
        params = trainable.state()
    else:
        params = {
            name: param.full_tensor()  # type: ignore[attr-defined]
            for name, param in trainable.model.named_parameters()
        }
    return {name: param.detach().numpy() for name, param in params.items()}


def begun(run: Run, settings: PipelineSettings) -> tuple[Pipeline, Iterator[torch.Tensor]]:
    """A pipeline that has trained its first step, and its batches."""
    trainable, batches = run.made("pipeline", settings)
    assert isinstance(trainable, Pipeline)
    training.step(trainable, batches)
    return trainable, batches

"""Trainings beside FSDP2's, in float64: what differs then is no rounding."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.pipelining
import torch.nn as nn

from baselines.settings import PipelineSettings, Settings
from baselines.strategy import Trainable, load
from tests.baselines import training
from tests.baselines.jobs import job
from tests.baselines.training import Family
from tests.fcdp.training import topology_of

Tuning = Literal["full", "lora", "half", "head"]


@dataclass(frozen=True)
class Run:
    """One training; picklable, so that it can be sent to ranks."""

    nodes: int
    ranks_per_node: int
    accumulation: int
    family: Family
    tuning: Tuning
    layers: int = 4
    steps: int = 20
    dtype: torch.dtype = torch.float64
    #: Type of parameters, where that is wider.
    params: torch.dtype | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def made(self, strategy: str, settings: Settings) -> tuple[Trainable, Iterable[torch.Tensor]]:
        """A training of this rank, and its micro-batches."""
        tuning = "lora" if self.tuning == "lora" else "full"
        model, blocks = training.built(self.family, tuning, layers=self.layers, width=16)
        if self.tuning == "half":  # the embedding and the first half of the blocks
            freeze([model.get_input_embeddings(), *blocks[: self.layers // 2]])
        if self.tuning == "head":
            freeze([model.get_input_embeddings(), *blocks])
        model.to(self.params or self.dtype)
        topology = topology_of(self.nodes, self.ranks_per_node)
        own = {"dtype": self.dtype, "accumulation": self.accumulation, "loss": loss}
        own |= {"settings": settings}
        trainable = load(strategy)(model, job(topology, blocks, **own))
        return trainable, training.batches_of(topology.rank)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy, in float32 or wider."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten())


def freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(False)


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


def trained(run: Run, strategy: str, settings: Settings) -> Result:
    trainable, batches = run.made(strategy, settings)
    losses = [training.step(trainable, iter(batches)) for _ in range(run.steps - 1)]
    trainable.take_ledger()
    given: list[int] = []
    send = torch.distributed.pipelining.schedules._batch_p2p

    def count(operations: Any, **more: Any) -> Any:
        given.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations, **more)

    with mock.patch("torch.distributed.pipelining.schedules._batch_p2p", count):
        losses.append(training.step(trainable, iter(batches)))
    ledger = trainable.take_ledger() or {"inter_node": {}}
    params = whole(trainable)  # before an evaluation, after which FSDP2 leaves its root gathered
    held_out = trainable.evaluate(next(training.batches_of(7))).item()
    sent = ledger["inter_node"]
    return Result(losses, params, held_out, sent, sum(given), trainable.closed_form_bytes)


def whole(trainable: Trainable) -> dict[str, Any]:
    """All parameters, as arrays, by the model's own names."""
    if isinstance(trainable.job.settings, PipelineSettings):
        params = trainable.state()  # type: ignore[attr-defined]
    else:
        params = {
            name: param.full_tensor()  # type: ignore[attr-defined]
            for name, param in trainable.model.named_parameters()
        }
    return {name: param.detach().numpy() for name, param in params.items()}

"""A small model whose ends share a matrix, and what each rank computes with, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from baselines.cyclic.parts import Owned
from baselines.cyclic.ring import Executor
from baselines.cyclic.synchronous import Cyclic
from baselines.settings import CyclicSettings
from baselines.strategy import Job, load
from tests.fcdp.training import topology_of

WIDTH, VOCABULARY, BLOCKS = 6, 11, 5
LEARNING_RATE = 0.01


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.out(torch.tanh(self.into(hidden)))
        return hidden + changed


class Tied(nn.Module):
    """Blocks between an embedding and a head of the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(micro_batch: int, step: int) -> torch.Tensor:
    """One micro-batch of one step, int64 (2, 5)."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    return torch.randint(0, VOCABULARY, (2, 5), generator=generator)


def made(
    nodes: int, ranks_per_node: int, settings: CyclicSettings, *, frozen: bool = False, k: int = 1
) -> tuple[Tied, Job]:
    """Return a model, the same on all ranks, and its job; ``frozen``: half of its parameters."""
    torch.manual_seed(1)
    model = Tied()
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_("into" in name or "norm" in name)
    job = Job(
        topology=topology_of(nodes, ranks_per_node),
        blocks=[*model.blocks],
        dtype=torch.float32,
        learning_rate=LEARNING_RATE,
        micro_batch=2,
        accumulation=k,
        settings=settings,
        loss=loss,
    )
    return model, job


@dataclass
class Told:
    """What one rank has computed with, and found, in each step."""

    losses: list[float] = field(default_factory=list)
    #: Each parameter when its block begins forward; others after forward.
    used: list[dict[str, torch.Tensor]] = field(default_factory=list)
    #: Mean gradients over all ranks, of the stages that this rank updates.
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


def trained(
    strategy: str,
    ranks: int,
    settings: CyclicSettings,
    steps: int,
    frozen: bool = False,
    evaluated: tuple[int, ...] = (),
) -> Told:
    """This rank's training; ``evaluated``: after so many steps, and at the end."""
    model, job = made(ranks, 1, settings, frozen=frozen)
    names = {id(param): name for name, param in model.named_parameters()}
    trainable: Any = load(strategy)(model, job)
    told = Told()
    _note_forwards(model, told)
    stop = _note_gradients(trainable, names, told)
    for step in range(steps):
        if step in evaluated:
            told.held_out.append(trainable.evaluate(batch(99, 0)).item())
        told.used.append({})
        told.losses.append(trainable.step([batch(job.topology.rank, step)]).item())
    told.used.append({})
    told.held_out.append(trainable.evaluate(batch(99, 0)).item())
    stop()
    return told


def _note_forwards(model: Tied, told: Told) -> None:
    """Called after the strategy has its hooks, so that these see what it has put there."""

    def note(prefix: str, module: nn.Module) -> None:
        if module.training:
            for name, param in module.named_parameters(prefix):
                told.used[-1][name] = param.detach().clone()

    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(
            lambda module, _, prefix=f"blocks.{index}": note(prefix, module)
        )
    for name in ("norm", "head"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, _, prefix=name: note(prefix, module)
        )


def _note_gradients(trainable: Any, names: dict[int, str], told: Told) -> Callable[[], None]:
    """Note the gradients that each update is given, until what is returned is called."""
    if isinstance(trainable, Cyclic):
        update = trainable.update

        def noted() -> None:
            params = [*trainable.model.parameters()]
            told.gradients.append(
                {names[id(p)]: p.grad.clone() for p in params if p.grad is not None}
            )
            update()

        trainable.update = noted
        return lambda: None
    assert isinstance(trainable, Executor)
    original = Owned.update
    stages = {id(owned): trainable._stages[i] for i, owned in trainable._owned.items()}

    def noting(self: Owned, gradients: torch.Tensor) -> None:
        params = stages[id(self)].trained
        parts = gradients.split([param.numel() for param in params])
        told.gradients.append(
            {names[id(p)]: g.view(p.shape).clone() for p, g in zip(params, parts, strict=True)}
        )
        original(self, gradients)

    def stop() -> None:
        Owned.update = original

    Owned.update = noting
    return stop

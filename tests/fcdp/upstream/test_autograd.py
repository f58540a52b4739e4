"""Outputs, modules and parameters that a loss leaves out, and activations in containers."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.fcdp.upstream.models import Branches, DoubleLinear
from tests.fcdp.upstream.running import Run, adam, cases, train


@cases((True,), (False,))
def test_an_output_that_the_loss_leaves_out(run: Run, reshard: bool) -> None:
    """The second of two outputs falls out of the loss in mid-run."""
    model = DoubleLinear(24, use_second=True)
    run.shard([model.lin1, model], reshard_after_forward=reshard)
    run.cache(model)

    def loss(step: int) -> torch.Tensor:
        first, second = model(run.input(2, 24, step=step))
        return (first * second).sum() if step < 2 else first.sum()

    train(run, model, adam(model), loss)


@cases((True,), (False,))
def test_a_module_that_never_runs(run: Run, reshard: bool) -> None:
    model = DoubleLinear(24, use_second=False)
    run.shard([model.lin1, model.lin2, model], reshard_after_forward=reshard)
    run.cache(model)
    train(run, model, adam(model), lambda step: model(run.input(2, 24, step=step)).sum())


@cases()
def test_other_parameters_receive_gradients_in_each_step(run: Run) -> None:
    """Parameters of one group receive gradients in turn, alike on all ranks."""
    model = Branches(6)
    run.shard([model])
    run.cache(model)
    train(
        run,
        model,
        adam(model),
        lambda step: model(run.input(2, 6, step=step), used=("left", "right")[step % 2]).sum(),
    )


@cases()
def test_ranks_use_different_parameters_of_a_group(run: Run) -> None:
    """Ranks use different parameters of a group, which then sends zeros for the others."""
    model = Branches(6)
    run.shard([model])
    model.set_reduce_scatter_unused_params(True)
    run.cache(model)
    used = ("left", "right")[run.topology.rank % 2]
    train(run, model, adam(model), lambda step: model(run.input(2, 6, step=step), used=used).sum())


Pair = namedtuple("Pair", "x y")


class Contained(nn.Module):
    """Two layers on the first element of a container, which keeps its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, container: Any) -> Any:
        if isinstance(container, dict):
            return {"x": self._compute(container["x"])}
        first = self._compute(container[0])
        if isinstance(container, Pair):
            return container._replace(x=first)
        return type(container)([first])

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.lin2(F.relu(self.lin1(x))))


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.kind = kind
        self.parts = nn.ModuleList(Contained() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        container: Any = {
            "list": [x],
            "tuple": (x,),
            "dict": {"x": x},
            "namedtuple": Pair(x, torch.ones_like(x)),
        }[self.kind]
        for part in self.parts:
            container = part(container)
        y: torch.Tensor = container["x"] if self.kind == "dict" else container[0]
        return y


@cases(("list",), ("tuple",), ("dict",), ("namedtuple",))
def test_activations_in_containers(run: Run, kind: str) -> None:
    model = Chain(kind)
    run.shard([*model.parts, model])
    run.cache(model)
    train(run, model, adam(model), lambda step: model(run.input(2, 24, step=step)).sum(), steps=2)

"""Followers of optimizers may end at any time."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch.optim import Optimizer

from fcdp.optimizers import StaleOptimizers, follow_optimizers


class Follower:
    def __init__(self, calls: list[str], name: str) -> None:
        self._calls = calls
        self._name = name
        self._itself = self  # so that only the garbage collector ends it

    def before_step(self, optimizer: Optimizer) -> None:
        self._calls.append(f"{self._name}: before")
        gc.collect(1)  # as any allocation may; older objects than these are other tests'

    def after_step(self, optimizer: Optimizer) -> None:
        self._calls.append(f"{self._name}: after")
        gc.collect(1)


def test_a_follower_may_end_while_an_optimizer_steps() -> None:
    calls: list[str] = []
    gc.disable()  # only the followers collect, while they are called
    follow_optimizers(living := Follower(calls, "kept"))
    follow_optimizers(Follower(calls, "dropped"))
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    gc.enable()
    assert len(calls) == 4
    calls.clear()
    gc.collect()
    optimizer.step()
    assert calls == ["kept: before", "kept: after"]
    assert living is not None
    assert weight.item() == -1.0


@pytest.mark.parametrize("named", [False, True])
def test_a_step_begins_when_its_closure_has_computed_gradients(named: bool) -> None:
    calls: list[str] = []
    follower = Follower(calls, "it")
    follow_optimizers(follower)
    weight = torch.nn.Parameter(torch.ones(1))

    def closure() -> torch.Tensor:
        calls.append("closure")
        weight.grad = torch.ones(1)
        return weight.detach().clone()

    optimizer = torch.optim.SGD([weight], lr=1.0)
    kwargs = {"closure": closure} if named else {}
    assert optimizer.step(*(() if named else (closure,)), **kwargs) == 1.0
    assert calls == ["closure", "it: before", "it: after"]

    def forever(self: object, closure: Callable[[], object]) -> None:
        closure()
        closure()

    calls.clear()
    several = type("Several", (torch.optim.SGD,), {"step": forever})([weight], lr=1.0)
    several.step(closure)
    assert calls == ["closure", "it: before", "closure", "it: after"]


def test_an_optimizer_of_no_parameters_is_not_an_older_one_of_a_frozen_model() -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    none: list[torch.nn.Parameter] = []
    StaleOptimizers(frozen, []).refuse(torch.optim.SGD([{"params": none}], lr=1.0))
    trained = torch.nn.Linear(2, 2, bias=False)
    older = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], lr=1.0)
    with pytest.raises(RuntimeError, match="1 of its 1 parameters"):
        StaleOptimizers(trained, []).refuse(older)

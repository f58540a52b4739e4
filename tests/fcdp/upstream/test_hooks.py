"""Hooks on gradients see what they see with FSDP2, or accumulation refuses them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, cases
from tests.ranks import on_ranks


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@cases(("gathered",), ("sharded",), ("before",))
def test_hooks_on_gradients(run: Run, when: str) -> None:
    """Hooks that double a gradient, on parameters before sharding, after it, or while gathered."""
    model = mlps(2, 4)
    seen: list[float] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(float(local(gradient).abs().sum()))
        return gradient * 2

    def register() -> None:
        for param in model.parameters():
            param.register_hook(double)

    if when == "before":
        register()
    run.shard([*model, model])
    if when == "sharded":
        register()
    run.cache(model)
    if when == "gathered":
        for layer in model:
            layer.unshard()
        register()
        for layer in model:
            layer.reshard()
    for step in range(2):
        model(run.input(4, 4, step=step)).sum().backward()
        run.see(f"calls {step}", len(seen))
        run.see_gradients(model)
    run.see("gradients", torch.tensor(seen))


@cases((True,), (False,))
def test_an_optimizer_in_backward(run: Run, reshard: bool) -> None:
    model = run.set_up(mlps(3, 4), reshard_after_forward=reshard)
    optimizers = {
        param: torch.optim.AdamW([param], lr=0.05, eps=1e-3) for param in model.parameters()
    }

    def step_and_forget(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_forget)
    for step in range(4):
        loss = model(run.input(4, 4, step=step)).sum()
        run.see(f"loss {step}", loss)
        loss.backward()
        run.see_params(model)


@pytest.mark.parametrize("kind", ["post-accumulate-gradient", "all-reduce"])
@on_ranks(2)
def test_hooks_under_accumulate_are_refused(kind: str) -> None:
    """They would see no gradient, or the sum of one micro-batch alone."""
    run = Run(topology_of(2, 1), cached=True)
    model = run.set_up(mlps(2, 4))
    if kind == "all-reduce":
        model[0].set_all_reduce_hook(print)
    else:
        next(model.parameters()).register_post_accumulate_grad_hook(print)
    refused = r"fcdp\.accumulate\(last=False\): 0 has a post-.* or an all-reduce hook"
    with pytest.raises(RuntimeError, match=refused), fcdp.accumulate(model, last=False):
        raise AssertionError("the micro-batch began")
    with fcdp.accumulate(model, last=True):
        model(run.input(4, 4)).sum().backward()


def before_each_backward(model: nn.Sequential, look: Callable[[], None]) -> None:
    """Call ``look`` when the gradient of a block's output has been computed."""

    def hook(gradient: torch.Tensor) -> None:
        look()

    for block in model:
        block.register_forward_hook(lambda _, inputs, output: output.register_hook(hook) and None)


@cases(("outputs", False), ("modules", False), ("outputs", True), ("callbacks", False))
def test_hooks_may_read_gradients_in_backward(run: Run, who: str, only_rank_0: bool) -> None:
    """Every gradient that is there, when a block's backward begins or ends, or at the very end.

    As with FSDP2 on the CPU, which waits; on one rank alone too.
    """
    model = run.set_up(mlps(5, 6))
    reads = run.topology.rank == 0 or not only_rank_0

    def look() -> None:
        if reads:
            for name, param in model.named_parameters():
                if param.grad is not None:
                    run.see(f"{who} {name}", param.grad)

    if who == "modules":
        for block in model:
            block.register_full_backward_hook(lambda *_: look())
    elif who == "outputs":
        before_each_backward(model, look)
    else:
        engine = torch.autograd.Variable._execution_engine
        before_each_backward(model, lambda: engine.queue_callback(look))
    for step in range(2):
        model(run.input(4, 6, step=step).requires_grad_()).sum().backward()
        run.see_gradients(model)
        model.zero_grad()

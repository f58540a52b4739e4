"""Training parity: one group and many, casts after init, what is registered, odd call orders."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tests.fcdp.training import whole
from tests.fcdp.upstream.models import MLP, VOCABULARY, Transformer, mlps
from tests.fcdp.upstream.running import Run, adam, all_sharded, cases, steps, train


@cases(
    ([(16, 15), (15, 8)], False),
    ([(7, 15), (15, 3)], False),
    ([(16, 17), (17, 8)], False),
    ([(32, 16), (16, 8)], True),
)
def test_a_single_group_of_even_and_uneven_shards(
    run: Run, sizes: list[tuple[int, int]], largest: bool
) -> None:
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(*sizes[0]), nn.ReLU(), nn.Linear(*sizes[1]))

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(param.shape.index(max(param.shape)))

    run.shard([model], shard_placement_fn=place if largest else None)
    run.cache(model)
    x = run.input(4, sizes[0][0])
    train(run, model, adam(model), lambda step: model(x).sum())


@cases(
    (True, False, False),
    (False, False, False),
    (True, True, False),
    (True, False, True),
    (False, True, True),
)
def test_many_groups(run: Run, reshard: bool, async_op: bool, offload: bool) -> None:
    model = mlps(3, 5)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    run.shard([*model, model], reshard_after_forward=reshard, **options)
    if async_op:
        model._set_unshard_async_op(True)
    run.cache(model)
    train(run, model, adam(model), lambda step: model(run.input(8, 5, step=step)).sum())


@cases()
def test_a_cast_after_sharding(run: Run) -> None:
    torch.manual_seed(42)
    model = MLP(4).to(torch.float32)
    run.shard([model.in_proj, model.out_proj, model])
    run.cache(model)
    model.to(torch.float64)
    x = run.input(2, 4, dtype=torch.float64)
    train(run, model, adam(model), lambda step: model(x).sum())
    for param in model.parameters():
        assert param.dtype == param.to_local().dtype == torch.float64
        assert param.grad is not None
        assert param.grad.dtype == torch.float64


@cases((True,), (False,), (None,))
def test_what_is_registered_after_forward_and_backward(run: Run, reshard: bool | None) -> None:
    torch.manual_seed(42)
    model = nn.Sequential(MLP(3), MLP(3))
    reference = copy.deepcopy(model)
    inner: list[nn.Module] = [model[0].in_proj, model[0].out_proj]
    run.shard([*inner, model], reshard_after_forward=reshard)
    run.cache(model)
    model(run.input(2, 3))
    inside = {id(param) for module in inner for param in module.parameters()}
    for name, param in model.named_parameters():
        kept = reshard is False or (reshard is None and id(param) not in inside)
        assert isinstance(param, DTensor) != kept, name
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert all_sharded(model)
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(param), wanted)
    model(run.input(2, 3)).sum().backward()
    assert all_sharded(model)
    run.see_gradients(model)


@cases()
def test_a_submodule_runs_forward_and_backward_by_itself(run: Run) -> None:
    """Forwards and backwards of sub-modules, beside those of the root."""
    model = mlps(3, 8)
    run.shard([*model, model])
    run.cache(model)
    for step in steps(run, model, 4):
        x = run.input(2, 8, step=step)
        root = model(x).sum()
        root.backward()
        if step > 0:  # FSDP2 wants the root's forward first
            part = model[0](x).sum()
            part.backward()
            run.see(f"part {step}", part)
        run.see(f"root {step}", root)


class Repeated(nn.Module):
    """Calls its inner module several times per forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.inner, self.outer = MLP(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.inner(x) + self.inner(x)))


@cases((True,), (False,))
def test_a_module_is_called_several_times(run: Run, reshard: bool) -> None:
    model = Repeated()
    run.shard([model.inner, model], reshard_after_forward=reshard)
    run.cache(model)
    train(run, model, adam(model), lambda step: model(run.input(8, 4, step=step)).sum())


@cases((True, True), (True, False), (False, True), (False, False))
def test_two_forwards_before_one_backward(run: Run, checkpointing: bool, reshard: bool) -> None:
    """As preference training has it: one loss of two forwards."""
    model = Transformer(checkpointing=checkpointing)
    inner = [part for layer in model.layers for part in (layer.mlp, layer)]
    run.shard([*inner, model], reshard_after_forward=reshard)
    run.cache(model)

    def loss(step: int) -> torch.Tensor:
        first, second = (model(run.tokens(VOCABULARY, 2, 6, step=10 * step + i)) for i in (1, 2))
        return (first.mean() - second.mean()).pow(2) + first.square().mean()

    train(run, model, adam(model), loss, steps=3)

"""Training parity: many groups, casts after init, what is registered, scaled gradients."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from tests.fcdp.training import whole
from tests.fcdp.upstream.models import MLP, mlps
from tests.fcdp.upstream.running import Run, adam, all_sharded, cases, train


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


@cases((True,), (False,))
def test_a_gradient_scaler(run: Run, bad: bool) -> None:
    """What the scaler finds in one rank's shard, it finds on all."""
    model = mlps(2, 6)
    run.shard([*model, model])
    run.cache(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(4):
        loss = model(run.input(4, 6, step=step)).sum()
        run.see(f"loss {step}", loss)
        scaler.scale(loss).backward()
        if bad and step == 1 and run.topology.rank == 0:
            gradient = next(model.parameters()).grad
            gradient.to_local().view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        run.see_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(f"scale {step}", scaler.get_scale())
    run.see_params(model)

"""State dicts: sharded, full, partial, kept while training goes on, and loaded from meta."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.fcdp.training import whole
from tests.fcdp.upstream.models import MLP, mlps
from tests.fcdp.upstream.running import Run, adam, all_sharded, cases


def stacked(dim: int) -> nn.Sequential:
    torch.manual_seed(42)
    return nn.Sequential(MLP(dim), nn.Sequential(MLP(dim), nn.Linear(dim, dim)), MLP(dim))


@cases((3, False, True), (2, False, True), (5, False, False), (16, True, True))
def test_saved_and_loaded_state(run: Run, dim: int, largest: bool, reshard: bool) -> None:
    """Values of a state dict are the parameters' memory, and loading writes into it."""
    model = stacked(dim)

    def place(param: nn.Parameter) -> Shard:
        return Shard(param.shape.index(max(param.shape)))

    run.set_up(model, reshard_after_forward=reshard, shard_placement_fn=place if largest else None)
    x = run.input(2, dim)
    before = model.state_dict()
    for name, param in model.named_parameters():
        assert isinstance(before[name], DTensor)
        assert before[name].to_local().data_ptr() == param.to_local().data_ptr()  # type: ignore[attr-defined]
    run.see("before", model(x))
    after = model.state_dict()  # reshards what stayed gathered
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(value.to_local(), before[name].to_local())
    model.load_state_dict(
        {name: value.detach().clone().fill_(0.1) for name, value in after.items()}
    )
    assert all_sharded(model)
    run.see("loaded", model(x))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.2)
    run.see("filled", model(x))
    run.see_params(model)


@cases()
def test_a_state_dict_that_is_kept(run: Run) -> None:
    torch.manual_seed(42)
    model = nn.Linear(4, 4, bias=False)
    run.set_up(model, [model], reshard_after_forward=True)
    state = model.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(run.input(4, 4, step=step)).sum()
        run.see(f"loss {step}", loss)
        loss.backward()
        optimizer.step()
        assert torch.equal(state["weight"].to_local(), model.weight.to_local())
    run.see("state", state["weight"])


@cases((False,), (True,))
def test_a_model_loaded_from_the_meta_device(run: Run, offload: bool) -> None:
    """Sharded on the meta device, loaded piece by piece with ``assign=True``."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    options: dict[str, Any] = {}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    run.shard([*model, model], **options)
    generator = torch.Generator().manual_seed(7)
    for name, param in list(model.named_parameters()):
        assert isinstance(param, DTensor)
        value = torch.randn(param.shape, generator=generator)
        piece = distribute_tensor(value, param.device_mesh, param.placements)
        model.load_state_dict({name: piece}, assign=True, strict=False)
    run.cache(model)
    for step in range(2):
        run.see(f"output {step}", model(run.input(4, 4, step=step)))
    run.see_params(model)


@cases((False,), (True,))
def test_a_model_initialised_from_the_meta_device(run: Run, cached_first: bool) -> None:
    """``to_empty`` and an initialisation on the device, before FCDP or after it."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    run.shard([*model, model])
    if cached_first:
        run.cache(model)
    model.to_empty(device=torch.get_default_device())
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.5, 0.5)
    if not cached_first:
        run.cache(model)
    for step in range(2):
        output = model(run.input(4, 6, step=step))
        run.see(f"output {step}", output)
        output.sum().backward()
    run.see_gradients(model)


@cases()
def test_a_full_state_dict_from_rank_0(run: Run) -> None:
    """A full state dict on rank 0, broadcast into a model that has changed since."""
    model = run.set_up(mlps(2, 6))
    optimizer = adam(model)
    x = run.input(4, 6)
    model(x).sum().backward()
    optimizer.step()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=full)
    optim_state = get_optimizer_state_dict(model, optimizer, options=full)
    if run.topology.rank == 0:
        for name, param in model.named_parameters():
            assert state[name].shape == param.shape
    else:
        assert state == {}
    expected = {name: whole(param.detach()).clone() for name, param in model.named_parameters()}
    run.see("trained", model(x))
    model(x).sum().backward()
    optimizer.step()
    run.see("trained on", model(x))
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=sent)
    set_optimizer_state_dict(model, optimizer, optim_state, options=sent)
    for name, param in model.named_parameters():
        assert torch.equal(whole(param.detach()), expected[name])
    run.see("restored", model(x))
    model(x).sum().backward()
    optimizer.step()
    run.see("went on", model(x))
    run.see_params(model)


@cases((False,), (True,))
def test_parts_of_a_state_dict(run: Run, assign: bool) -> None:
    """``strict=False`` with some of the keys, into a sub-module too."""
    model = run.set_up(mlps(2, 6))
    x = run.input(4, 6)
    for step in range(3):
        run.see(f"output {step}", model(x))
        part = {
            name: (value.detach() * 0.5).clone()
            for name, value in model.state_dict().items()
            if "in_proj" in name
        }
        model.load_state_dict(part, strict=False, assign=assign)
        model[1].load_state_dict(
            {name: value.detach() * 1.5 for name, value in model[1].state_dict().items()},
            assign=assign,
        )
    run.see_params(model)


@cases()
def test_a_load_that_is_refused(run: Run) -> None:
    model = run.set_up(mlps(2, 6))
    x = run.input(4, 6)
    for step in range(2):
        output = model(x)
        run.see(f"output {step}", output)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        output.sum().backward()
    run.see_gradients(model)

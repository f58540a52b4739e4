"""Training parity: one group and many, what is registered, odd call orders, what a loss leaves out.

Tied weights and modules that share a group; frozen and trained parameters; norms and clipping.
"""

import copy
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tests.fcdp.releases import since_2_13
from tests.fcdp.training import whole
from tests.fcdp.upstream.models import MLP, VOCABULARY, Branches, DoubleLinear, Transformer, mlps
from tests.fcdp.upstream.running import (
    Run,
    adam,
    all_sharded,
    cases,
    steps,
    train,
    train_on,
    train_on_tokens,
)


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

    run.set_up(model, [model], shard_placement_fn=place if largest else None)
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
    train_on(run, model, 8, 5)


@cases()
def test_a_cast_after_sharding(run: Run) -> None:
    torch.manual_seed(42)
    model = run.set_up(MLP(4).to(torch.float32))
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
    run.set_up(model, [*inner, model], reshard_after_forward=reshard)
    model(run.input(2, 3))
    inside = {id(param) for module in inner for param in module.parameters()}
    for name, param in model.named_parameters():
        gathered = reshard is False or (reshard is None and id(param) not in inside)
        assert isinstance(param, DTensor) != gathered, name
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert all_sharded(model)
    for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(param), theirs)
    model(run.input(2, 3)).sum().backward()
    assert all_sharded(model)
    run.see_gradients(model)


@cases()
def test_a_submodule_runs_forward_and_backward_by_itself(run: Run) -> None:
    model = run.set_up(mlps(3, 8))
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
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.inner, self.outer = MLP(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.inner(x) + self.inner(x)))


@cases((True,), (False,))
def test_a_module_is_called_several_times(run: Run, reshard: bool) -> None:
    model = Repeated()
    run.set_up(model, [model.inner, model], reshard_after_forward=reshard)
    train_on(run, model, 8, 4)


@cases((True, True), (True, False), (False, True), (False, False))
def test_two_forwards_before_one_backward(run: Run, checkpointing: bool, reshard: bool) -> None:
    """Two forwards have one loss, as in preference training."""
    model = Transformer(checkpointing=checkpointing)
    inner = [part for layer in model.layers for part in (layer.mlp, layer)]
    run.set_up(model, [*inner, model], reshard_after_forward=reshard)

    def loss(step: int) -> torch.Tensor:
        first, second = (model(run.tokens(VOCABULARY, 2, 6, step=10 * step + i)) for i in (1, 2))
        return (first.mean() - second.mean()).pow(2) + first.square().mean()

    train(run, model, adam(model), loss, steps=3)


@cases((True,), (False,))
def test_an_output_that_the_loss_leaves_out(run: Run, reshard: bool) -> None:
    """The second of two outputs falls out of the loss in mid-run."""
    model = DoubleLinear(24, use_second=True)
    run.set_up(model, [model.lin1, model], reshard_after_forward=reshard)

    def loss(step: int) -> torch.Tensor:
        first, second = model(run.input(2, 24, step=step))
        return (first * second).sum() if step < 2 else first.sum()

    train(run, model, adam(model), loss)


@cases((True,), (False,))
def test_a_module_that_never_runs(run: Run, reshard: bool) -> None:
    model = run.set_up(DoubleLinear(24, use_second=False), reshard_after_forward=reshard)
    train_on(run, model, 2, 24)


@cases()
def test_other_parameters_receive_gradients_in_each_step(run: Run) -> None:
    """Parameters of one group receive gradients in turn, alike on all ranks."""
    model = Branches(6)
    run.set_up(model, [model])
    train(
        run,
        model,
        adam(model),
        lambda step: model(run.input(2, 6, step=step), used=("left", "right")[step % 2]).sum(),
    )


@since_2_13
@cases()
def test_ranks_use_different_parameters_of_a_group(run: Run) -> None:
    """Ranks use different parameters of a group, which then sends zeros for the others."""
    model = Branches(6)
    run.shard([model])
    model.set_reduce_scatter_unused_params(True)
    run.cache(model)
    used = ("left", "right")[run.topology.rank % 2]
    train(run, model, adam(model), lambda step: model(run.input(2, 6, step=step), used=used).sum())


def local_norms(model: nn.Module, order: float) -> list[float]:
    return [
        torch.linalg.vector_norm(param.grad.to_local(), ord=order).item()
        for param in model.parameters()
        if param.grad is not None
    ]


@cases((2.0, False), (1.0, False), (float("inf"), False), (2.0, True))
def test_clip_grad_norm(run: Run, order: float, frozen: bool) -> None:
    model = Transformer(2)
    if frozen:
        model.embedding.requires_grad_(False)
        model.layers[0].mlp.requires_grad_(False)
    run.set_up(model)
    optimizer = adam(model)
    limit = 0.01
    for step in range(4):
        optimizer.zero_grad()
        model(run.tokens(VOCABULARY, 3, 8, step=step)).square().sum().backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(
            model.parameters(), limit, norm_type=order, foreach=True
        )
        assert norm.full_tensor() > limit, "nothing was clipped"
        run.see(f"norm {step}", norm.full_tensor())
        assert max(local_norms(model, order)) <= limit * (1 + 1e-6)
        run.see_gradients(model)
        optimizer.step()
    run.see_params(model)


@cases((True,), (False,))
def test_a_gradient_scaler(run: Run, bad: bool) -> None:
    """The scaler finds on all ranks what it finds in one rank's shard."""
    model = run.set_up(mlps(2, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(4):
        loss = model(run.input(4, 6, step=step)).sum()
        run.see(f"loss {step}", loss)
        scaler.scale(loss).backward()
        if bad and step == 1 and run.topology.rank == 0:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.to_local().view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        run.see_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(f"scale {step}", scaler.get_scale())
    run.see_params(model)


@cases(
    (True, False, "before"),
    (True, True, "before"),
    (True, False, "sharded"),
    (False, True, "sharded"),
    (True, True, "cached"),
    (False, False, "cached"),
)
def test_frozen_and_trained_in_one_group(
    run: Run, reshard: bool, checkpointing: bool, when: str
) -> None:
    """Weights are frozen before ``fully_shard``, after it, or after FCDP is set up."""
    model = mlps(3, 8)

    def freeze() -> None:
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)

    if when == "before":
        freeze()
    if checkpointing:
        for mlp in model:
            checkpoint(mlp)
    run.shard([*model, model], reshard_after_forward=reshard)
    optimizer = adam(model)
    if when == "sharded":
        freeze()
    run.cache(model)
    if when == "cached":
        freeze()
    train(run, model, optimizer, lambda step: model(run.input(8, 8, step=step)).sum())


@cases((True, True), (True, False), (False, True), (False, False))
def test_frozen_and_trained_groups_in_turn(run: Run, reshard: bool, unfreeze: bool) -> None:
    """Every other layer is frozen; between a forward without gradients, and a late thaw."""
    torch.manual_seed(42)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    for layer in layers[::2]:
        layer.requires_grad_(False)
    run.set_up(model, [*layers, model], reshard_after_forward=reshard)
    for step in steps(run, model, 5):
        if unfreeze and step == 3:
            model.requires_grad_(True)
        with torch.set_grad_enabled(step != 1):
            loss = model(run.input(8, 8, step=step)).sum()
        run.see(f"loss {step}", loss)
        if step != 1:
            loss.backward()


@cases((True, True), (True, False), (False, True), (False, False))
def test_tied_weights(run: Run, reshard: bool, checkpointing: bool) -> None:
    model = run.set_up(
        Transformer(tied=True, checkpointing=checkpointing), reshard_after_forward=reshard
    )
    train_on_tokens(run, model)


class Chunked(nn.Module):
    """A model whose head can be left to the caller."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.embed, self.body = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, skip_head: bool = False) -> torch.Tensor:
        x = self.norm(self.body(self.embed(tokens)))
        return x if skip_head else self.head(x)

    def groups(self, *, tie: bool) -> list[nn.Module | list[nn.Module]]:
        if tie:
            return [self.body, [self.embed, self.norm, self.head], self]
        return [self.embed, self.body, [self.norm, self.head], self]


@cases((True, True), (True, None), (False, True), (False, None))
def test_modules_in_one_group(run: Run, tie: bool, reshard: bool | None) -> None:
    """``fully_shard([a, b])``: several modules gather at once."""
    model = Chunked(tie=tie)
    run.set_up(model, model.groups(tie=tie), reshard_after_forward=reshard)
    train_on_tokens(run, model)


def backward_by_chunks(model: Chunked, hidden: torch.Tensor, chunks: int) -> None:
    """The head's forward and backward on each chunk, then the body's backward."""
    gradients = []
    for chunk in torch.chunk(hidden.detach(), chunks, dim=1):
        part = chunk.contiguous().requires_grad_(True)
        model.head(part).square().sum().backward()
        gradients.append(part.grad)
    hidden.backward(torch.cat(gradients, dim=1))  # type: ignore[arg-type]


@since_2_13
@cases((True, 1), (True, 2), (False, 1), (False, 2))
def test_a_loss_in_chunks(run: Run, tie: bool, micro_batches: int) -> None:
    """A loss in chunks, through the head of a group that the forward ran in part."""
    model = Chunked(tie=tie)
    run.set_up(model, model.groups(tie=tie))
    for step in steps(run, model):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            hidden = model(run.tokens(VOCABULARY, 2, 8, step=10 * step + micro), skip_head=True)
            run.see(f"hidden {step}.{micro}", hidden)
            backward_by_chunks(model, hidden, chunks=4)


@cases()
def test_a_head_that_stays_gathered_for_its_chunks(run: Run) -> None:
    model = Chunked(tie=False)
    run.set_up(model, model.groups(tie=False))
    for step in steps(run, model):
        hidden = model(run.tokens(VOCABULARY, 2, 8, step=step), skip_head=True)
        for keep in (True, False):
            model.head.set_reshard_after_forward(not keep)
            model.head.set_reshard_after_backward(not keep)
            if keep:
                backward_by_chunks(model, hidden, chunks=4)
        model.head.reshard()

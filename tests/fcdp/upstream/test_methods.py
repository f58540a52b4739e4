"""Ignored parameters, forward methods of other names, shared streams, contiguous shards."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication

from tests.fcdp.training import update
from tests.fcdp.upstream.models import MLP, mlps
from tests.fcdp.upstream.running import Run, adam, cases, train_on


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.ignored = nn.Linear(8, 8), nn.Linear(8, 8)
        self.offset = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.ignored(x)) - self.offset


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.inner, self.scale = Inner(), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.scale).sum()


@cases((True,), (False,))
def test_ignored_parameters(run: Run, whole_module: bool) -> None:
    """Some parameters stay whole on each rank; their gradients are the caller's business."""
    model = Outer()
    ignored = set(model.inner.ignored.parameters()) if whole_module else {model.scale}
    run.set_up(model, [model.inner.proj, model.inner, model], ignored_params=ignored)
    assert all(not isinstance(param, DTensor) for param in ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        loss = model(run.input(4, 8, step=step))
        run.see(f"loss {step}", loss)
        loss.backward()
        for param in ignored:
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= run.topology.world_size
        run.see_gradients(model)
        with implicit_replication():
            optimizer.step()
        optimizer.zero_grad()
    run.see_params(model)


class Vision(nn.Module):
    """Used through another method than ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, kernel_size=2, stride=2)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.patches(images).flatten(2).transpose(1, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images).sum(dim=1)


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.vision, self.projector = Vision(), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.projector(self.vision.features(images))

    def score(self, images: torch.Tensor) -> torch.Tensor:
        return self.forward(images).square().mean()


@cases((False,), (True,))
def test_a_forward_method_inside_the_model(run: Run, cached_first: bool) -> None:
    model = Captioner()
    run.shard([model.vision, model.projector, model])
    if cached_first:
        run.cache(model)
    register_fsdp_forward_method(model.vision, "features")
    if not cached_first:
        run.cache(model)
    train_on(run, model, 2, 3, 8, 8)


@cases((False,), (True,))
def test_a_forward_method_of_the_root(run: Run, writes: bool) -> None:
    """Training goes through the method alone, and evaluation through ``forward``."""
    model = run.set_up(Captioner())
    register_fsdp_forward_method(model.vision, "features")
    register_fsdp_forward_method(model, "score")
    optimizer = adam(model)
    for step in range(4):
        images = run.input(2, 3, 8, 8, step=step)
        loss = model.score(images)
        run.see(f"loss {step}", loss)
        update(loss, optimizer)
        if writes:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
                run.see("evaluated", model.score(images))
    run.see_params(model)


@pytest.mark.skipif(not hasattr(fsdp, "share_comm_ctx"), reason="this torch has no share_comm_ctx")
@cases()
def test_share_comm_ctx(run: Run) -> None:
    """Roots beside each other, as stages of a pipeline are, each with its own cache."""
    model = mlps(3, 6)
    for stage in model:
        run.shard([stage])
        run.cache(stage)
        stage._get_fsdp_state()._lazy_init()
    fsdp.share_comm_ctx(list(model))
    train_on(run, model, 4, 6)


@cases()
def test_shard_placement_fn(run: Run) -> None:
    """Shards along the second dimension are contiguous, gathered or not."""
    torch.manual_seed(42)
    model = MLP(4)

    def place(param: nn.Parameter) -> Shard:
        return Shard(1 if param.ndim > 1 else 0)

    run.set_up(model, shard_placement_fn=place)

    def contiguous(module: nn.Module, args: object) -> None:
        assert all(param.is_contiguous() for param in module.parameters())

    for layer in (model.in_proj, model.out_proj):
        layer.register_forward_pre_hook(contiguous)
    train_on(run, model, 2, 4)
    for param in model.parameters():
        assert param.to_local().is_contiguous()  # type: ignore[attr-defined]


@cases()
def test_slices_of_a_sharded_container(run: Run) -> None:
    """A module's class and its indexing stay as FSDP2 has made them."""
    model = run.set_up(mlps(3, 4))
    assert type(model).__name__ == "FSDPSequential"
    part = model[:2]
    run.see("part", part(run.input(2, 4)))
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    assert state is model._get_fsdp_state()  # type: ignore[operator]

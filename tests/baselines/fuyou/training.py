"""A small model under Fuyou, and the same by PyTorch's AdamW in memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

from baselines import optimizers
from baselines.fuyou.train import Fuyou
from baselines.settings import FuyouSettings
from baselines.strategy import Job
from tests.baselines.jobs import job
from tests.baselines.training import Family, Tuning, batches_of, built, step
from tests.fcdp.training import topology_of

#: Values and moments of parameters, by name.
State = dict[str, tuple[torch.Tensor, list[torch.Tensor]]]


def settings(**chosen: Any) -> FuyouSettings:
    return FuyouSettings(**({"dram_budget": "16 MiB"} | chosen))


def made(
    chosen: FuyouSettings,
    *,
    family: Family = "gpt2",
    tuning: Tuning = "full",
    layers: int = 3,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    k: int = 1,
    nodes: int = 1,
) -> tuple[nn.Module, Job]:
    model, blocks = built(family, tuning, layers, width)
    own = {"accumulation": k, "settings": chosen}
    own["optimizer"] = optimizers.AdamW(inverse_sqrt_after=3)
    return model, job(topology_of(nodes, 1), blocks, dtype=dtype, **own)


def steps(trainer: Fuyou, count: int, batches: Iterator[torch.Tensor]) -> list[float]:
    return [step(trainer, batches) for _ in range(count)]


def state(trainer: Fuyou) -> State:
    return {name: (values, moments) for name, values, moments in trainer.parameters()}


def in_memory(count: int, **model: Any) -> tuple[list[float], State]:
    """Losses and state after so many steps of AdamW in memory, with float32 masters."""
    module, job = made(settings(), **model)
    params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    chosen: Any = job.optimizer
    optimizer = torch.optim.AdamW(masters.values(), betas=(0.9, chosen.beta2), fused=True)
    module.to(job.dtype)
    batches, losses = batches_of(), []
    for done in range(count):
        optimizer.param_groups[0]["lr"] = job.learning_rate * chosen.rate(done)
        total = torch.zeros(())
        for _ in range(job.accumulation):
            loss = job.loss(module, next(batches)) / job.accumulation
            loss.backward()
            total += loss.detach()
            _add_gradients(params, masters)
        optimizer.step()
        optimizer.zero_grad()
        for name, param in params.items():
            param.data.copy_(masters[name].detach())
        losses.append(total.item())
    entries = ("exp_avg", "exp_avg_sq")
    final = {
        name: (master.detach(), [optimizer.state[master][entry] for entry in entries])
        for name, master in masters.items()
    }
    return losses, final


def _add_gradients(params: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]) -> None:
    for name, param in params.items():
        gradient = param.grad.float()
        before, param.grad = masters[name].grad, None
        masters[name].grad = gradient if before is None else before + gradient


def same(actual: State, expected: State) -> None:
    """Compare the trained parameters and their moments, bit for bit."""
    for name, (values, moments) in expected.items():
        pairs: Sequence[Any] = [
            (actual[name][0], values),
            *zip(actual[name][1], moments, strict=True),
        ]
        assert all(torch.equal(mine, other) for mine, other in pairs), name

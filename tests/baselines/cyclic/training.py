"""A small model whose ends share a matrix, and what each rank computes with, step by step."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn

from baselines.cyclic.interleaved import Interleaved
from baselines.optimizers import SGD, AdamW, AnyOptimizer
from baselines.settings import CyclicSettings
from baselines.strategy import Job, load
from tests.baselines.jobs import job as job_of
from tests.fcdp.training import topology_of

WIDTH, VOCABULARY, BLOCKS = 6, 11, 5
ADAMW = AdamW()
#: Steps as long as gradients are, which AdamW's are not: it shows whether they are means.
PLAIN = SGD(kind="sgd")


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
        return self.head(self.norm(hidden))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(micro_batch: int, step: int) -> torch.Tensor:
    """One micro-batch of one step, int64 (2, 5)."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    return torch.randint(0, VOCABULARY, (2, 5), generator=generator)


def made(
    nodes: int, ranks_per_node: int, settings: CyclicSettings, *, frozen: bool = False, k: int = 1
) -> tuple[Tied, Job]:
    """Return a model, the same on all ranks, and its job of ``k`` micro-batches per step on each.

    ``frozen``: half of its parameters.
    """
    torch.manual_seed(1)
    model = Tied()
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_("into" in name or "norm" in name)
    topology = topology_of(nodes, ranks_per_node)
    return model, job_of(topology, model.blocks, accumulation=k, settings=settings, loss=loss)


@dataclass
class Trace:
    """Losses and parameters of one micro-batch's place in a training, by step."""

    losses: list[float] = field(default_factory=list)
    #: Each parameter when its block begins forward; others after forward.
    used: list[dict[str, torch.Tensor]] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


def trained(
    strategy: str,
    ranks: int,
    settings: CyclicSettings,
    steps: int,
    frozen: bool = False,
    evaluated: tuple[int, ...] = (),
    optimizer: AnyOptimizer = ADAMW,
    k: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[Trace]:
    """This rank's training; ``evaluated``: after so many steps, and at the end.

    Micro-batches that take turns have a trace each, of which the first has the step's losses; all
    others of a rank share one.
    """
    model, job = made(ranks, 1, settings, frozen=frozen, k=k)
    trainable = load(strategy)(model, replace(job, optimizer=optimizer, dtype=dtype))
    count = k if isinstance(trainable, Interleaved) else 1
    traces = [Trace(used=[{} for _ in range(steps + 1)]) for _ in range(count)]
    first, now = traces[0], 0

    def note(prefix: str, module: nn.Module) -> None:
        number, step = 0, now
        if isinstance(trainable, Interleaved):
            if (flight := trainable._running) is None:
                return
            number, step = flight.number, flight.step
        elif not module.training:
            return
        for name, param in module.named_parameters(prefix):
            traces[number].used[step][name] = param.detach().clone()

    # After the strategy has its hooks, so that these see what it has put there.
    for name in (*(f"blocks.{index}" for index in range(BLOCKS)), "norm", "head"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, _, prefix=name: note(prefix, module)
        )
    for now in range(steps):
        if now in evaluated:
            first.held_out.append(trainable.evaluate(batch(99, 0)).item())
        numbers = range(k * job.topology.rank, k * (job.topology.rank + 1))
        first.losses.append(trainable.step([batch(number, now) for number in numbers]).item())
    now = steps
    first.held_out.append(trainable.evaluate(batch(99, 0)).item())
    return traces


def alike(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: str) -> None:
    """Compare parameters or gradients by name, to float tolerance."""
    assert mine.keys() == other.keys()
    for name in mine:
        torch.testing.assert_close(
            mine[name], other[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{where} {n} {m}"
        )

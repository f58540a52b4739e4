"""Workers that train apart, and the same in one process, step by step as the listing has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from baselines.co2.train import LocalSteps
from baselines.schedule import CO2, LOCAL_SGD, STREAMING, Schedule
from baselines.settings import CO2Settings, LocalSGDSettings, StreamingSettings
from tests.baselines.jobs import LEARNING_RATE, job
from tests.fcdp.training import topology_of

WIDTH = 6
#: The paper's update alone: nothing is scaled, clipped or remembered.
PLAIN: dict[str, Any] = {"outer_momentum": 0.0, "clip": None, "penalty": "none"}


@dataclass(frozen=True)
class Training:
    settings: LocalSGDSettings
    nodes: int = 1
    ranks_per_node: int = 1
    steps: int = 12
    accumulation: int = 1

    @property
    def schedule(self) -> Schedule:
        """The schedule of the strategy that has these settings."""
        if isinstance(self.settings, StreamingSettings):
            return STREAMING
        return CO2 if isinstance(self.settings, CO2Settings) else LOCAL_SGD

    @property
    def workers(self) -> int:
        apart = self.ranks_per_node if self.settings.worker == "rank" else 1
        return self.nodes * apart // self.settings.nodes_per_worker


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH, bias=False)
    )


def loss(of: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    inputs = torch.sin(sequences.float())
    return (of(inputs) - torch.cos(sequences.float())).square().mean()


def batches(rank: int) -> Iterator[torch.Tensor]:
    """Endless micro-batches of one rank, int64 (2, WIDTH)."""
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randint(0, 50, (2, WIDTH), generator=generator)


def made(training: Training) -> tuple[nn.Sequential, LocalSteps]:
    trained = model()
    worker_job = job(
        topology_of(training.nodes, training.ranks_per_node),
        list(trained)[: getattr(training.settings, "fragments", 1)],
        accumulation=training.accumulation,
        settings=training.settings,
        schedule=training.schedule,
        loss=loss,
    )
    return trained, LocalSteps(trained, worker_job)


def flat(of: nn.Module) -> torch.Tensor:
    """All parameters end to end, gathered where they are sharded."""
    whole = [
        getattr(param, "full_tensor", lambda param=param: param)() for param in of.parameters()
    ]
    return torch.cat([param.detach().flatten() for param in whole])


def apart(training: Training) -> Iterator[list[nn.Sequential]]:
    """All workers in one process, after each step of their own; the caller may change them."""
    ranks = training.nodes * training.ranks_per_node // training.workers
    models = [model() for _ in range(training.workers)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=LEARNING_RATE) for each in models]
    data = [[batches(w * ranks + r) for r in range(ranks)] for w in range(training.workers)]
    for _ in range(training.steps):
        for each, optimizer, sources in zip(models, optimizers, data, strict=True):
            for source in sources * training.accumulation:
                (loss(each, next(source)) / ranks / training.accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield models


def listing(training: Training) -> list[torch.Tensor]:
    """The starts of all rounds by the paper's listing.

    Its scalars are computed in other ways than the strategy's.
    """
    settings = training.settings
    momentum_of = getattr(settings, "outer_momentum", 0.0)
    clip = getattr(settings, "clip", None)
    penalty = getattr(settings, "penalty", "none")
    scale = LEARNING_RATE if getattr(settings, "by_learning_rate", False) else 1.0
    rate = getattr(settings, "outer_learning_rate", 1.0)
    starts = [flat(model())]
    momentum = torch.zeros_like(starts[0])
    firsts: list[torch.Tensor] = []
    before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for step, models in enumerate(apart(training)):
        if step % settings.interval == 0:
            firsts = [(flat(each) - starts[-1]).norm() for each in models]
        if (step + 1) % settings.interval:
            continue
        ends = torch.stack([flat(each) for each in models]).mean(0)
        now = (starts[-1], ends, torch.stack(firsts).square().mean().sqrt())
        start = starts[-1]
        if known := (before if training.schedule is CO2 else now):
            gap: torch.Tensor | float = 1.0
            if penalty != "none":
                steps = settings.interval if penalty == "first-steps" else 1
                gap = 1 + (starts[-1] - starts[-2]).norm() / (steps * known[2])
            momentum = momentum_of * momentum + (known[0] - known[1]) / (gap * scale)
            move = momentum if clip is None else momentum.clamp(-clip, clip)
            start = start - rate * scale * move
        before = now
        starts.append(start)
        for each in models:
            nn.utils.vector_to_parameters(start.clone(), each.parameters())
    return starts


def by_step(training: Training) -> list[torch.Tensor]:
    """The parameters of this rank at first, and after each step."""
    trained, workers = made(training)
    data = batches(workers.job.topology.rank)
    parameters = [flat(trained)]
    for _ in range(training.steps):
        workers.step([next(data) for _ in range(training.accumulation)])
        parameters.append(flat(trained))
    workers.settle()
    return parameters


def starts(training: Training) -> list[torch.Tensor]:
    """The starts of all rounds, as this rank has them after each."""
    return by_step(training)[:: training.settings.interval]


#: A setting in which each part of CO2 does something.
ALL = CO2Settings(interval=3, outer_momentum=0.3, clip=0.004, penalty="first-step")
ON_HOST = ALL.model_copy(update={"outer_on": "host"})

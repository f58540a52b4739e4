"""DeepSpeed's engine: compiles its operators, gives it an optimizer, runs its own loop."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory

from baselines.phases import Phases
from baselines.strategy import CacheUse, Job, make_optimizer, trainable_parameters


def initialize(
    model: nn.Module,
    job: Job,
    config: dict[str, Any],
    closed_form_bytes: float,
    optimizer: torch.optim.Optimizer | None = None,
) -> DeepSpeedZero3:
    """Wrap the model in DeepSpeed's engine.

    ``config`` is DeepSpeed's configuration; ``closed_form_bytes`` the least bytes per step that a
    node must send; ``optimizer`` replaces the one that all strategies use.
    """
    build_operators()
    deepspeed.init_distributed(
        dist_backend="gloo" if job.topology.mesh.device_type == "cpu" else "nccl"
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trainable_parameters(model),
        optimizer=optimizer or make_optimizer(model, job),
        config=config,
    )
    phases = Phases(job.topology.mesh.device_type)
    return DeepSpeedZero3(engine, job, closed_form_bytes, phases)


def build_operators(*more: str) -> None:
    """Compile DeepSpeed's shared-memory operator, and those of the builders ``more``, in turn.

    DeepSpeed compiles them when they are first used, and ranks of one host that do so together
    fail now and then. The first rank compiles (half a minute, once per machine), the others load.
    """
    builders = list(more)
    if not torch.accelerator.is_available():
        builders.append("ShareMemCommBuilder")

    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        folder = Path(_get_build_directory(builder.name, False))
        with folder.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Torch's own lock stays behind where a process is killed while it compiles, and all
            # later ones would wait for it for ever.
            (folder / "lock").unlink(missing_ok=True)
            builder.load(verbose=False)


class DeepSpeedZero3:
    """DeepSpeed's own loop: its engine counts micro-batches and steps after the last."""

    engine = "deepspeed"
    engine_version: str = deepspeed.__version__
    policy: str | None = None
    host_cache_bytes: int | None = None
    interval = 1
    cache: CacheUse | None = None

    def __init__(self, engine: Any, job: Job, closed_form_bytes: float, phases: Phases) -> None:
        self._engine = engine
        self._job = job
        self.closed_form_bytes = closed_form_bytes
        self._phases = phases

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        losses = []
        for batch in micro_batches:
            with self._phases.timed("forward"):
                loss = self._job.loss(self._engine, batch)
            with self._phases.timed("backward"):
                self._engine.backward(loss)  # divides by the number of micro-batches itself
            with self._phases.timed("optimizer"):
                self._engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        self._engine.eval()
        found = self._job.measured(self._engine, batch)
        self._engine.train()
        return found

    def settle(self) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        return None

    def take_phases(self) -> dict[str, float] | None:
        return self._phases.take()


if __name__ == "__main__":
    build_operators()

"""What training loops of this folder have alike: evaluation, and nothing to tell of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn

from baselines.phases import Phases
from baselines.strategy import CacheUse, Job


class Loop:
    """A model in training, with the members of ``Trainable`` but ``step``."""

    engine = "fsdp2"
    engine_version = torch.__version__
    policy: str | None = None
    interval = 1

    def __init__(self, model: nn.Module, job: Job, closed_form_bytes: float) -> None:
        self.model = model
        self.job = job
        self.closed_form_bytes = closed_form_bytes
        self._phases = Phases(job.topology.mesh.device_type)

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        with self.casting():
            found = self.job.measured(self.model, batch)
        self.model.train()
        return found

    def casting(self) -> AbstractContextManager[object]:
        """What has forwards compute in ``job.dtype``; here FSDP2's mixed precision does it."""
        return nullcontext()

    def settle(self) -> None:
        pass

    def take_metrics(self) -> Mapping[str, Any]:
        return {}

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        return None

    def take_phases(self) -> dict[str, float] | None:
        return self._phases.take()

    @property
    def cache(self) -> CacheUse | None:
        return None

    @property
    def host_cache_bytes(self) -> int | None:
        return None

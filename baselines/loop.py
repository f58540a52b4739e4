"""What training loops of this folder have alike: evaluation, and nothing to tell of a cache."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn

from baselines.strategy import CacheUse, Job


class Phases:
    """Seconds that this rank has spent in each phase since the last ``take``.

    On the CPU a call returns when its work is done. On an accelerator it returns when the work is
    queued, so that its time says nothing, and nothing is kept.
    """

    def __init__(self, device_type: str) -> None:
        self._on_cpu = device_type == "cpu"
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the block's time as this phase's."""
        begin = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begin

    def take(self) -> dict[str, float] | None:
        """Return the seconds by phase and begin again; ``None`` on an accelerator."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken if self._on_cpu else None


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

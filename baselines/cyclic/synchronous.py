"""Cyclic Data Parallelism's optimisation on ranks that step together, as its authors trained.

Each rank is one micro-batch, and reduces its gradients with all others as DDP does. Updates that
would not have reached it in time by the cyclic schedule it applies one step late: the parameters of
each micro-batch, and so the training, are the same, without the even traffic and memory.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from baselines.cyclic.routes import is_fresh
from baselines.cyclic.stages import chosen_runs, parameters
from baselines.part import restored
from baselines.pytorch.ddp import DDP
from baselines.settings import CyclicSettings
from baselines.strategy import Job, replicated_bytes, trainable_parameters
from fcdp.exchange import wait_all


class Cyclic(DDP):
    """DDP's loop; stages that are late on this rank step by the gradients of the step before."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        """Replicate the model, and cut it into stages of about as many parameters each.

        Raises ``ValueError`` for more stages than blocks or ranks.
        """
        settings, topology = job.settings, job.topology
        assert isinstance(settings, CyclicSettings)
        runs = chosen_runs(settings.stages, job.blocks, topology.world_size, "ranks")
        closed_form = replicated_bytes(model, job)
        model.to(topology.mesh.device_type)
        stages = parameters(model, job.blocks, runs)
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
        super().__init__(replica, job, closed_form)
        #: Late parameters, and their gradients of the last step: none before the first.
        self._late = [
            param
            for stage, params in enumerate(stages)
            if not is_fresh(settings.rule, topology.rank, stage, len(stages))
            for param in params
        ]
        self._put_off: list[torch.Tensor] | None = None
        (group,), late = self.optimizer.param_groups, set(self._late)
        group["params"] = [param for param in group["params"] if param not in late]

    def update(self) -> None:
        """Step, late parameters by their last gradients and with that step's learning rate."""
        # Copies: DDP reduces the next ones in the same memory.
        grads = [param.grad for param in self._late if param.grad is not None]  # DDP gives all one
        coming = [grad.clone() for grad in grads]
        for grad, last in zip(grads, self._put_off or coming, strict=True):
            grad.copy_(last)
        super().update()
        if self._put_off is None:
            # Their own group, whose learning rates begin with their first step, the next one.
            self.optimizer.add_param_group({"params": self._late})
        self._put_off = coming

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Return what is measured with the mean of the ranks' parameters, as its authors test."""
        values = [param.data for param in trainable_parameters(self.model)]
        with restored(values):
            wait_all([dist.all_reduce(value, async_op=True) for value in values])
            torch._foreach_div_(values, self.job.topology.world_size)
            return super().evaluate(batch)

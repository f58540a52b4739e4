"""DeepSpeed's engine: compiles its operators, gives it an optimizer, runs its own loop."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn as nn
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import groups
from torch.utils.cpp_extension import _get_build_directory

from baselines.strategy import Job, Trainable, make_optimizer, trainable_parameters


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
    on_cpu = job.topology.mesh.device_type == "cpu"
    deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl")
    if on_cpu:
        Init._allgather_params_coalesced = _gather
    params = trainable_parameters(model)
    size = config["zero_optimization"].get("zero_hpz_partition_size", 1)
    # Without an optimizer, as frozen models are, it fails to make hpZ's group: 0.19.6 calls a
    # method of the optimizer on its engine.
    if size > 1 and groups._get_zero_param_intra_parallel_group() is None:
        groups._create_zero_param_parallel_group(size)
    engine, *_ = deepspeed.initialize(
        model=model,
        # A frozen model has neither.
        model_parameters=params or None,
        optimizer=optimizer or (make_optimizer(params, job) if params else None),
        config=config,
    )
    return DeepSpeedZero3(engine, job, closed_form_bytes)


def build_operators(*more: str) -> None:
    """Compile DeepSpeed's shared-memory operator, and those of the builders ``more``, in turn.

    DeepSpeed compiles them when they are first used, and ranks of one host that do so together
    fail now and then. The first rank compiles (half a minute), the others load. What is compiled
    stays in the virtual environment of the torch that it is compiled for, if it is writable.
    """
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "operators")))
    shared = () if torch.accelerator.is_available() else ("ShareMemCommBuilder",)
    for name in (*more, *shared):
        builder = get_accelerator().create_op_builder(name)
        folder = Path(_get_build_directory(builder.name, False))
        with folder.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Torch's own lock stays behind where a process is killed while it compiles, and all
            # later ones would wait for it for ever.
            (folder / "lock").unlink(missing_ok=True)
            builder.load(verbose=False)


def _gather(zero: Init, params: Sequence[Any], hierarchy: int = 0, quantize: bool = False) -> None:
    """Gather parameters and wait for each: DeepSpeed, until its pull request 8539, waits for one.

    Gloo ends gathers in any order, so that others were read before they arrived. CUDA keeps order.
    """
    assert not quantize or not params, "what quantises needs CUDA"
    for work in [zero._allgather_param(param, async_op=True) for param in params]:
        work.wait()


class DeepSpeedZero3(Trainable):
    """DeepSpeed's own loop: its engine counts micro-batches and steps after the last."""

    engine_version = deepspeed.__version__

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        engine: Any = self.model
        losses = []
        for batch in micro_batches:
            with self._timed("forward"):
                loss = self.job.loss(engine, batch)
            with self._timed("backward"):
                engine.backward(loss)  # divides by the number of micro-batches itself
            with self._timed("optimizer"):
                engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


if __name__ == "__main__":
    build_operators()

"""DeepSpeed ZeRO stage 3, set to do on a small model what it does by default on one of 30B."""

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

from baselines.strategy import (
    Job,
    causal_loss,
    make_optimizer,
    trainable_parameters,
    zero3_bytes,
)

#: DeepSpeed's defaults count elements. Of the paper's 30B model they are small shares, of a model
#: that fits this testbed they are all of it. The same shares keep the same schedule.
_REFERENCE_PARAMETERS = 30e9
_DEFAULT_MAX_REUSE_DISTANCE = 1e9
_DEFAULT_PREFETCH_BUCKET = 5e7


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """Partition ``model`` over all ranks with ``deepspeed.initialize``."""
    return initialize(model, job, configuration(model, job), zero3_bytes(model, job))


def initialize(
    model: nn.Module,
    job: Job,
    config: dict[str, Any],
    closed_form_bytes: float,
    optimizer: torch.optim.Optimizer | None = None,
) -> DeepSpeedZero3:
    """DeepSpeed's engine with this configuration, and an optimizer if not the usual one."""
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
    return DeepSpeedZero3(engine, closed_form_bytes)


def configuration(model: nn.Module, job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration for this model."""
    parameters = sum(param.numel() for param in model.parameters())
    block = max(sum(param.numel() for param in module.parameters()) for module in job.blocks)
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        # The default is 1.0 since 0.19.4; the other strategies do not clip.
        "gradient_clipping": 0.0,
        "bf16": {"enabled": job.dtype == torch.bfloat16},
        # No optimizer step's time goes into console output.
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 3,
            # How many gathered elements may be alive. The default of 1e9 is two blocks of a 30B
            # model, so two blocks here; it would keep a small model whole from forward to backward.
            "stage3_max_live_parameters": 2 * block,
            # Parameters used again within this distance are not released: a thirtieth of 30B.
            "stage3_max_reuse_distance": _share(parameters, _DEFAULT_MAX_REUSE_DISTANCE),
            # At 30B this is less than one matrix, so one matrix is fetched ahead. What is fetched
            # ahead over the turn from forward to backward is not gathered again in backward.
            "stage3_prefetch_bucket_size": _share(parameters, _DEFAULT_PREFETCH_BUCKET),
            # At 30B the default of 1e5 elements keeps norms, biases and low-rank factors whole on
            # every rank. Here the same parameters stay whole, and no matrix of the model does.
            "stage3_param_persistence_threshold": _largest_persistent(model),
            # The default of 5e8 is one block of a 30B model: reduce a block at a time.
            "reduce_bucket_size": block,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def _share(parameters: int, default: float) -> int:
    """As large a share of this model as the default is of 30B."""
    return max(1, round(parameters * default / _REFERENCE_PARAMETERS))


def _largest_persistent(model: nn.Module) -> int:
    """Elements of the largest parameter that DeepSpeed keeps whole at 30B: see above."""
    vectors = [param.numel() for param in model.parameters() if param.dim() == 1]
    matrices = [
        param.numel()
        for name, param in model.named_parameters()
        if param.dim() > 1 and not _is_low_rank(name)
    ]
    adapters = [param.numel() for name, param in model.named_parameters() if _is_low_rank(name)]
    return min(max(vectors + adapters, default=0), min(matrices) - 1)


def _is_low_rank(name: str) -> bool:
    return "lora_" in name


def build_operators(*more: str) -> None:
    """Compile DeepSpeed's shared-memory operator, and those of the builders ``more``, one by one.

    DeepSpeed compiles them when they are first used, and ranks of one host that do so together
    fail now and then. The first rank compiles (half a minute, once a machine), the others load.
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

    def __init__(self, engine: Any, closed_form_bytes: float) -> None:
        self._engine = engine
        self.closed_form_bytes = closed_form_bytes

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        losses = []
        for sequences in micro_batches:
            loss = causal_loss(self._engine, sequences)
            self._engine.backward(loss)  # divides by the number of micro-batches itself
            self._engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        return None


if __name__ == "__main__":
    build_operators()

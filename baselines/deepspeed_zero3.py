"""DeepSpeed ZeRO stage 3, set to do on a small model what it does by default on one of 30B."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn as nn

from baselines.strategy import Job, causal_loss, make_optimizer, trainable_parameters

#: Size of the model that DeepSpeed's absolute defaults are scaled from.
_REFERENCE_PARAMETERS = 30e9
_DEFAULT_MAX_REUSE_DISTANCE = 1e9


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """Partition ``model`` over all ranks with ``deepspeed.initialize``."""
    build_operators()
    deepspeed.init_distributed(dist_backend="gloo" if job.topology.mesh.device_type == "cpu" else "nccl")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trainable_parameters(model),
        optimizer=make_optimizer(model, job),
        config=configuration(model, job),
    )
    return DeepSpeedZero3(engine)


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
            # The default of 1e9 elements keeps a whole small model alive from forward to backward,
            # so that nothing is gathered twice. At 30B it is two blocks: prefetch has room.
            "stage3_max_live_parameters": 2 * block,
            # Of 30B the default of 1e9 elements is a thirtieth. Of a small model it is all of it,
            # and parameters used again within that distance are never released.
            "stage3_max_reuse_distance": round(
                parameters * _DEFAULT_MAX_REUSE_DISTANCE / _REFERENCE_PARAMETERS
            ),
            # At 30B the default of 1e5 elements keeps norms, biases and low-rank factors whole on
            # every rank. Here the same parameters stay whole, and no matrix of the model does.
            "stage3_param_persistence_threshold": _largest_persistent(model),
            # Fetch one block ahead; the default of 5e7 elements would be the whole model.
            "stage3_prefetch_bucket_size": block,
            # Reductions a block at a time; the default of 5e8 would be the whole model.
            "reduce_bucket_size": block,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


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


def build_operators() -> None:
    """Compile DeepSpeed's shared-memory operator, one rank at a time.

    DeepSpeed compiles it when communication starts, and ranks of one host that do so together
    fail now and then. The first rank compiles (half a minute, once a machine), the others load.
    """
    if torch.accelerator.is_available():
        return
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    lock = Path(tempfile.gettempdir()) / f"deepspeed-build-{os.getuid()}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ShareMemCommBuilder().load(verbose=False)


class DeepSpeedZero3:
    """DeepSpeed's own loop: its engine counts micro-batches and steps after the last."""

    engine = "deepspeed"
    engine_version: str = deepspeed.__version__
    policy: str | None = None
    host_cache_bytes: int | None = None

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        losses = []
        for sequences in micro_batches:
            loss = causal_loss(self._engine, sequences)
            self._engine.backward(loss)  # divides by the number of micro-batches itself
            self._engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def closed_form_bytes(self) -> float | None:
        return None

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        return None


if __name__ == "__main__":
    build_operators()

"""DeepSpeed ZeRO stage 3, set to do on a small model what it does by default on one of 30B."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from baselines.strategy import Job

#: DeepSpeed's defaults count elements. Of the paper's 30B model they are small shares, of a model
#: that fits this testbed they are all of it. The same shares keep the same schedule.
_REFERENCE_PARAMETERS = 30e9
_DEFAULT_MAX_REUSE_DISTANCE = 1e9
_DEFAULT_PREFETCH_BUCKET = 5e7


def configuration(model: nn.Module, job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration for the model and the job, as ``deepspeed.initialize`` takes it.

    Call it before sharding: thresholds are shares of the model's elements.
    """
    parameters = sum(param.numel() for param in model.parameters())
    block = max(sum(param.numel() for param in module.parameters()) for module in job.blocks)
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        # The default is 1.0 since 0.19.4; the other strategies do not clip.
        "gradient_clipping": 0.0,
        "bf16": {"enabled": job.dtype == torch.bfloat16},
        # DeepSpeed asks for this to step anything but Adam.
        **({} if job.optimizer.kind == "adamw" else {"zero_allow_untested_optimizer": True}),
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
            # The default of 5e8 is one block of a 30B model: gradients are reduced block by block.
            "reduce_bucket_size": block,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def _share(parameters: int, default: float) -> int:
    """Elements that are as large a share of this model as the default is of 30B."""
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

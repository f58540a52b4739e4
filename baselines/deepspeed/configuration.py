"""DeepSpeed ZeRO stage 3, set to do on a small model what it does by default on one of 30B.

A strategy's schedule says what is changed of it: qwZ and qgZ are codecs, hpZ a cache inside the
node, MiCS shards inside the node, ZeRO-Offload and ZeRO-Infinity places on the host and on disk.
"""

import tempfile
from typing import Any

import torch
import torch.nn as nn

from baselines.deepspeed import engine
from baselines.deepspeed.engine import DeepSpeedZero3
from baselines.optimizers import AdamW
from baselines.schedule import Place, Schedule
from baselines.strategy import (
    Job,
    crossing_bytes,
    replicated_bytes,
    trainable_parameters,
    trained_numel,
    zero3_bytes,
)

#: DeepSpeed's defaults count elements. Of the paper's 30B model they are small shares, of a model
#: that fits this testbed they are all of it. The same shares keep the same schedule.
_REFERENCE_PARAMETERS = 30e9
_DEFAULT_MAX_REUSE_DISTANCE = 1e9
_DEFAULT_PREFETCH_BUCKET = 5e7
#: Part of an adapter's name.
_LOW_RANK = "lora_"
#: Bytes of an element in the codecs that DeepSpeed has; others have those of the job's type.
_CODEC_BYTES = {"int8": 1.0, "int4": 0.5}


def in_two_hops(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """MiCS that gathers in two hops, where a shard spans more than a node's fast links."""
    return build(model, job, hierarchical=True)


def build(model: nn.Module, job: Job, *, hierarchical: bool = False) -> DeepSpeedZero3:
    """Put the model under DeepSpeed as the strategy's schedule says.

    Raises ``ValueError`` for an offloaded optimizer that is not DeepSpeed's own.
    """
    schedule = job.schedule
    least_bytes = _least_bytes(model, job, schedule)
    config = configuration(model, job)
    zero: dict[str, Any] = config["zero_optimization"]
    if schedule.cache is not None:
        # A step drops secondary shards of trained parameters only, in 0.16.2 as in 0.19.6: frozen
        # ones are gathered across nodes once ever, as FCDP's are.
        zero["zero_hpz_partition_size"] = job.topology.ranks_per_node
    if schedule.gather_codec is not None:
        zero["zero_quantized_weights"] = True
    if schedule.reduce_codec is not None:
        zero["zero_quantized_gradients"] = True
    if schedule.shards == "node":
        zero["mics_shard_size"] = job.topology.ranks_per_node
        zero["mics_hierarchical_params_gather"] = hierarchical
    if "disk" in (schedule.parameters, schedule.optimizer):
        engine.build_operators("AsyncIOBuilder")
    if schedule.parameters != "device":
        zero["offload_param"] = _offloaded(schedule.parameters)
    if schedule.optimizer == "device":
        return engine.initialize(model, job, config, least_bytes)
    if job.optimizer != AdamW():
        raise ValueError(
            f"optimizer = {job.optimizer.name}: what is offloaded steps by DeepSpeed's own Adam; "
            "allowed is adamw as it is by default"
        )
    zero["offload_optimizer"] = _offloaded(schedule.optimizer)
    engine.build_operators("CPUAdamBuilder")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = DeepSpeedCPUAdam(trainable_parameters(model), lr=job.learning_rate)
    return engine.initialize(model, job, config, least_bytes, adam)


def _offloaded(to: Place) -> dict[str, Any]:
    """The setting that offloads to host memory or to NVMe.

    Swap files go to the directory for temporary files (``TMPDIR``). DeepSpeed gives them fixed
    names there and leaves them behind, so a directory is for the ranks of one job only; a cluster
    gives each node's ranks one that ends with the job.
    """
    on_nvme = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    # Page-locked memory is what makes copies overlap with compute; a CPU run has no copies.
    pinned = {"pin_memory": torch.accelerator.is_available()}
    return {**(on_nvme if to == "disk" else {"device": "cpu"}), **pinned}


def _least_bytes(model: nn.Module, job: Job, schedule: Schedule) -> float:
    """Least bytes per step that one node must send. What is offloaded is a rank's own part."""
    if schedule.shards == "node":
        return replicated_bytes(model, job)
    gathered, reduced = (
        _CODEC_BYTES.get(codec or "") for codec in (schedule.gather_codec, schedule.reduce_codec)
    )
    if schedule.cache is None:
        return zero3_bytes(model, job, gathered=gathered, reduced=reduced)
    # hpZ: trained parameters once per step, gradients per micro-batch.
    gathers, reductions = (
        crossing_bytes(trained_numel(model), job, size) for size in (gathered, reduced)
    )
    return gathers + reductions * job.accumulation


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
    whole: list[int] = []
    matrices: list[int] = []
    for name, param in model.named_parameters():
        (whole if param.dim() <= 1 or _LOW_RANK in name else matrices).append(param.numel())
    return min(max(whole, default=0), min(matrices) - 1)

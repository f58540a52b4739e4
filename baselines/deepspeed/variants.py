"""DeepSpeed's variants of ZeRO stage 3: what each changes of its configuration, and sends."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import torch
import torch.nn as nn

from baselines.deepspeed import engine
from baselines.deepspeed.configuration import configuration
from baselines.deepspeed.engine import DeepSpeedZero3
from baselines.optimizers import AdamW
from baselines.strategy import (
    Job,
    crossing_bytes,
    replicated_bytes,
    trainable_parameters,
    trained_numel,
    zero3_bytes,
)

_CPU = {"device": "cpu"}


def zero3(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO stage 3: parameters, gradients and optimizer states are sharded over all ranks."""
    return _build(model, job, zero3_bytes(model, job))


def hpz(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO++'s hpZ: a second shard inside the node, in device memory."""
    return _build(model, job, _hpz_bytes(model, job), _hpz(job))


def hpz_offload(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO++'s hpZ with shards in host memory: of existing systems the one nearest to FCDP."""
    return _build(model, job, _hpz_bytes(model, job), _hpz(job), param=_CPU)


def offload(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO-Offload: the optimizer's states are on the CPU, and it steps there.

    The bytes between nodes are ZeRO-3's: what is offloaded is a rank's own part.
    """
    return _build(model, job, zero3_bytes(model, job), optimizer=_CPU)


def offload_param(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO-Offload: parameters wait on the CPU, and the optimizer steps there."""
    return _build(model, job, zero3_bytes(model, job), optimizer=_CPU, param=_CPU)


def infinity(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO-Infinity: parameters and optimizer states on NVMe.

    Swap files go to the directory for temporary files (``TMPDIR``). DeepSpeed gives them fixed
    names there and leaves them behind, so a directory is for the ranks of one job only; a cluster
    gives each node's ranks one that ends with the job.
    """
    engine.build_operators("AsyncIOBuilder")
    nvme = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    return _build(model, job, zero3_bytes(model, job), optimizer=nvme, param=nvme)


def qwz(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO++'s qwZ alone: weights are gathered in int8 blocks."""
    least = zero3_bytes(model, job, gathered=1)
    return _build(model, job, least, {"zero_quantized_weights": True})


def qgz(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO++'s qgZ alone: gradients are reduced in int4 blocks."""
    least = zero3_bytes(model, job, reduced=0.5)
    return _build(model, job, least, {"zero_quantized_gradients": True})


def zeropp(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """ZeRO++: hpZ, qwZ and qgZ together.

    Trained parameters cross nodes once per step in int8, gradients per micro-batch in int4.
    """
    least = crossing_bytes(trained_numel(model), job, 1 + 0.5 * job.accumulation)
    quantised = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return _build(model, job, least, {**_hpz(job), **quantised})


def mics(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """MiCS: sharded over the ranks of a node, replicated across nodes.

    Gathers stay inside the node; gradients are all-reduced across nodes once per step.
    """
    return _mics(model, job, hierarchical=False)


def mics_hierarchical(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """MiCS that gathers in two hops, where a shard spans more than a node's fast links."""
    return _mics(model, job, hierarchical=True)


def _mics(model: nn.Module, job: Job, *, hierarchical: bool) -> DeepSpeedZero3:
    zero = {
        "mics_shard_size": job.topology.ranks_per_node,
        "mics_hierarchical_params_gather": hierarchical,
    }
    return _build(model, job, replicated_bytes(model, job), zero)


def _hpz(job: Job) -> dict[str, int]:
    """The setting for secondary shards over the ranks of a node.

    A step drops those of trained parameters only, in 0.16.2 as in 0.19.6: frozen parameters are
    gathered across nodes once ever, as FCDP's are.
    """
    return {"zero_hpz_partition_size": job.topology.ranks_per_node}


def _hpz_bytes(model: nn.Module, job: Job) -> float:
    """Least bytes per step of hpZ: trained parameters once, gradients per micro-batch."""
    return crossing_bytes(trained_numel(model), job) * (1 + job.accumulation)


def _build(
    model: nn.Module,
    job: Job,
    least_bytes: float,
    zero: Mapping[str, int] | None = None,
    *,
    optimizer: Mapping[str, str] | None = None,
    param: Mapping[str, str] | None = None,
) -> DeepSpeedZero3:
    """ZeRO stage 3 with the settings ``zero``, and parts offloaded to where the others say."""
    config = configuration(model, job)
    config["zero_optimization"].update(zero or {})
    # Page-locked memory is what makes copies overlap with compute; a CPU run has no copies.
    pinned = {"pin_memory": torch.accelerator.is_available()}
    if param is not None:
        config["zero_optimization"]["offload_param"] = {**param, **pinned}
    if optimizer is None:
        return engine.initialize(model, job, config, least_bytes)
    if job.optimizer != AdamW():
        raise ValueError(
            f"optimizer = {job.optimizer.name}: what is offloaded steps by DeepSpeed's own Adam; "
            "allowed is adamw as it is by default"
        )
    config["zero_optimization"]["offload_optimizer"] = {**optimizer, **pinned}
    engine.build_operators("CPUAdamBuilder")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adam = DeepSpeedCPUAdam(trainable_parameters(model), lr=job.learning_rate)
    return engine.initialize(model, job, config, least_bytes, adam)

"""torchtitan's Trainer, with FSDP2 and with FCDP, on the ranks of one process group."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.distributed import fsdp

import fcdp
from examples.trainers import torchtitan_llama
from fcdp.integrations import torchtitan
from tests.clients import tiny

STEPS = 3
DIVIDE = fsdp.disable_fsdp_gradient_division


def divide(model: nn.Module) -> None:
    """Have FSDP2 add up and divide by itself, as gloo knows no sum of scaled gradients."""
    DIVIDE(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def trained(
    topology: fcdp.Topology, engine: str, accumulation: int, tensor_parallel: int
) -> tuple[Any, list[tuple[float, ...]]]:
    losses: list[tuple[float, ...]] = []

    def log(self: Any, step: int, mean: float, most: float, norm: float, **others: Any) -> None:
        losses.append((mean, most, norm))

    world = dist.get_world_size()
    with (
        mock.patch.object(metrics.MetricsProcessor, "log", log),
        mock.patch.object(fsdp, "disable_fsdp_gradient_division", divide),
        torchtitan.use(topology if tensor_parallel == 1 else None) as end,
    ):
        if engine == "fsdp2":
            torchtitan._allow_cpus()
            end.close()
        config = torchtitan_llama.configuration()
        del config.model_spec.model.layers[2:]
        config.training.steps = STEPS
        config.training.mixed_precision_param = "float32"
        config.training.global_batch_size = 2 * accumulation * world // tensor_parallel
        config.parallelism.tensor_parallel_degree = tensor_parallel
        # With other backends torchtitan 0.3 asks FSDP2 for what torch 2.13 lacks.
        config.parallelism.spmd_backend = "partial_dtensor"
        torch.manual_seed(0)
        trainer = config.build()
        trainer.train()
    return trainer, losses


def compared(
    topology: fcdp.Topology, accumulation: int = 1, tensor_parallel: int = 1
) -> dict[str, Any]:
    theirs, expected = trained(topology, "fsdp2", accumulation, tensor_parallel)
    ours, losses = trained(topology, "fcdp", accumulation, tensor_parallel)
    (theirs_model,), (model,) = theirs.model_parts, ours.model_parts
    return tiny.beside(tiny.parameters(theirs_model), expected, model, losses)


CASES: dict[str, Callable[[fcdp.Topology], dict[str, Any]]] = {
    "dp": compared,
    "dp-accumulated": functools.partial(compared, accumulation=2),
    "dp-tp": functools.partial(compared, tensor_parallel=2),
}

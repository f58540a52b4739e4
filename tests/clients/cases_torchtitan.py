"""torchtitan's Trainer, with FSDP2 and with FCDP, on the ranks of one process group."""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import fsdp
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention

import fcdp
from examples.trainers import torchtitan_llama
from fcdp.engine import engine_of
from fcdp.integrations import torchtitan
from tests.clients import tiny

STEPS = 3
EXPERTS = 8
DIVIDE = fsdp.disable_fsdp_gradient_division
#: A clock for torchtitan, whose first rank sleeps for two seconds when it has trained.
AWAKE = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})


def divide(model: nn.Module) -> None:
    """Have FSDP2 add up and divide by itself, as gloo knows no sum of scaled gradients."""
    DIVIDE(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def mixture(*, lora: bool) -> Any:
    """A small Qwen 3 of torchtitan, whose blocks have experts."""
    adapters = [LoRAConverter.Config(rank=4, target_modules=["wo"])] if lora else None
    spec = qwen3.model_registry("debugmodel_moe", converters=adapters)
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        moe, routed = layer.moe, layer.moe.routed_experts
        for each in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
            each.num_experts = EXPERTS
        moe.router.top_k = routed.token_dispatcher.top_k = 2
        moe.router.gate.out_features = EXPERTS
        routed.inner_experts.hidden_dim = 64
    qwen3.Qwen3Model.get_attention_masks = lambda self, positions: None
    return spec


def trained(
    engine: str, topology: fcdp.Topology, accumulation: int, *, lora: bool, **degrees: int
) -> tuple[Any, list[tuple[float, ...]]]:
    """Train a Llama, or a mixture of experts where one of the ``degrees`` is theirs.

    Experts' gradients, and those beside them, are summed in float64, of which any order is one.
    """
    losses: list[tuple[float, ...]] = []

    def log(self: Any, step: int, mean: float, most: float, norm: float, **others: Any) -> None:
        losses.append((mean, most, norm))

    world, tensor_parallel = dist.get_world_size(), degrees.get("tensor_parallel", 1)
    with (
        mock.patch.object(metrics.MetricsProcessor, "log", log),
        mock.patch("torchtitan.trainer.time", AWAKE),
        mock.patch.object(fsdp, "disable_fsdp_gradient_division", divide),
        mock.patch.dict(TORCH_DTYPE_MAP, wide=torch.float64),
        torchtitan.use(topology if tensor_parallel == 1 else None) as end,
    ):
        if engine == "fsdp2":
            torchtitan._allow_cpus()
            end.close()
        config = torchtitan_llama.configuration()
        if "expert_parallel" in degrees:
            config.model_spec = mixture(lora=lora)
            config.training.mixed_precision_reduce = "wide"
        del config.model_spec.model.layers[2:]
        config.training.steps = STEPS
        config.training.mixed_precision_param = "float32"
        config.training.global_batch_size = 2 * accumulation * world // tensor_parallel
        for name, degree in degrees.items():
            setattr(config.parallelism, f"{name}_degree", degree)
        # With other backends torchtitan 0.3 asks FSDP2 for what torch 2.13 lacks.
        config.parallelism.spmd_backend = "partial_dtensor"
        torch.manual_seed(0)
        trainer = config.build()
        trainer.train()
    return trainer, losses


def compared(
    topology: fcdp.Topology, accumulation: int = 1, *, lora: bool = False, **degrees: int
) -> dict[str, Any]:
    """Train both ways; check each rank's gathers, and of experts its bytes.

    A micro-batch gathers each unit for forward and for backward, whatever the loss's chunks.
    """
    theirs, expected = trained("fsdp2", topology, accumulation, lora=lora, **degrees)
    ours, losses = trained("fcdp", topology, accumulation, lora=lora, **degrees)
    (theirs_model,), (model,) = theirs.model_parts, ours.model_parts
    ledger, units = fcdp.ledger(model), engine_of(model).entries
    assert ledger.hits + ledger.misses == 2 * STEPS * accumulation * len(units)
    if degrees.keys() == {"expert_parallel"}:
        sent = ledger.snapshot()["inter_node"]
        assert sent == closed_form(model, topology, accumulation, lora=lora, **degrees)
    return tiny.beside(tiny.parameters(theirs_model), expected, model, losses)


def closed_form(
    model: nn.Module,
    topology: fcdp.Topology,
    accumulation: int,
    *,
    lora: bool,
    expert_parallel: int,
) -> dict[str, int]:
    """Bytes that a rank sends to other nodes: parameters in float32, and gradients in float64.

    All once per step. What adapters leave frozen crosses once ever, but for what shares a unit with
    them: not experts, whose mesh is another.
    """
    ranks = dist.get_world_size()
    sent = dict.fromkeys(("forward", "backward", "reduce"), 0)
    for name, param in model.named_parameters():
        assert param.numel() % ranks == 0, name
        is_expert = ".inner_experts." in name
        nodes = min(topology.nodes, ranks // expert_parallel) if is_expert else topology.nodes
        times = STEPS if not lora or (name.startswith("layers.") and not is_expert) else 1
        part = (nodes - 1) * param.numel() // ranks
        sent["forward"] += times * part * 4
        sent["reduce"] += STEPS * param.requires_grad * part * 8
        if name == "norm.weight" and param.requires_grad and accumulation == 1:
            # It was to stay gathered, and was not cached; the chunked loss has it freed.
            sent["backward"] = part * 4
    return {phase: nbytes for phase, nbytes in sent.items() if nbytes}


def refused(topology: fcdp.Topology) -> dict[str, str]:
    """Return the words of a Trainer about a degree of 2 with torchtitan's default backend."""
    sentences = {}
    for name in ("pipeline", "tensor", "expert"):
        config = torchtitan_llama.configuration()
        setattr(config.parallelism, f"{name}_parallel_degree", 2)
        with torchtitan.use(topology), pytest.raises(ValueError, match="must") as refusal:
            config.build()
        sentences[f"{name}_parallel_degree"] = str(refusal.value)
    return sentences


CASES: dict[str, Callable[[fcdp.Topology], dict[str, Any]]] = {
    "refused": refused,
    "dp": compared,
    "dp-accumulated": functools.partial(compared, accumulation=2),
    "dp-tp": functools.partial(compared, tensor_parallel=2),
    **{f"ep{n}": functools.partial(compared, expert_parallel=n) for n in (1, 2, 4)},
    "ep2-lora": functools.partial(compared, expert_parallel=2, lora=True),
    "ep2-accumulated": functools.partial(compared, expert_parallel=2, accumulation=2),
    "ep2-tp": functools.partial(compared, expert_parallel=2, tensor_parallel=2),
    "ep2-hsdp": functools.partial(compared, expert_parallel=2, data_parallel_replicate=2),
}

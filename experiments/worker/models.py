"""The models of cells: those built in, by ``transformers``' configurations, and users' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from experiments.records.cell import Cell
from experiments.records.workload import (
    AnyModel,
    ConfiguredModel,
    Convolutional,
    ImageModel,
    Images,
    OwnModel,
)
from experiments.worker import configured, convolutional, images
from fcdp import Topology
from fcdp.checksum import checksum
from simulation.transformer import ATTENTION, ModelSpec, Transformer


def build(cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The cell's model and its transformer blocks, with equal weights on every rank.

    Raises ``ValueError`` naming line and key for a model that cannot be had.
    """
    torch.manual_seed(cell.seed)
    model, blocks = _made(cell.model, cell)
    if cell.tuning == "lora":
        model = _add_adapters(model, blocks, cell)
        if cell.frozen_dtype != "float32":  # else it stays as the model has it
            hold_frozen(model, getattr(torch, cell.frozen_dtype))
    return model, list(blocks)


def _made(spec: AnyModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    if isinstance(spec, ConfiguredModel):
        return configured.configured(spec, cell)
    if isinstance(spec, OwnModel):
        return configured.own(spec, cell)
    if isinstance(spec, ImageModel):
        return _network(spec, cell)
    model: nn.Module = _FAMILIES[spec.family](spec, cell.sequence_length)
    blocks: Any = model.get_submodule(_BLOCKS[spec.family])
    return model, blocks


def _network(spec: ImageModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    assert isinstance(cell.data, Images), "cells see to it"
    source = images.SOURCES[cell.data.images]
    (channels, size, _), classes = source.shape, source.classes
    if isinstance(spec, Convolutional):
        network = convolutional.small(channels, classes, layers=spec.layers, width=spec.width)
    else:
        network = convolutional.resnet(channels, classes, size, layers=spec.layers)
    return network, list(network.blocks)


def small_llama(layers: int) -> Any:
    """The Llama of the examples, of width 64: random weights, and no wait for them."""
    return _llama(ModelSpec(name="small", family="llama", layers=layers, width=64, heads=4), 64)


def _gpt2(spec: ModelSpec, sequence_length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=spec.vocabulary,
            n_positions=sequence_length,
            n_embd=spec.width,
            n_layer=spec.layers,
            n_head=spec.heads,
            # No dropout: strategies must see the same losses.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _llama(spec: ModelSpec, sequence_length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec.vocabulary,
            max_position_embeddings=sequence_length,
            hidden_size=spec.width,
            intermediate_size=Transformer.of(spec, sequence_length).mlp_width,
            num_hidden_layers=spec.layers,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.heads,
        )
    )


_FAMILIES: dict[str, Callable[[ModelSpec, int], Any]] = {"gpt2": _gpt2, "llama": _llama}
_BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}


def _add_adapters(model: Any, blocks: Sequence[nn.Module], cell: Cell) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    family = _family(cell.model)
    config = LoraConfig(
        task_type=None if family is None else "CAUSAL_LM",
        r=cell.lora_rank,
        lora_alpha=2 * cell.lora_rank,
        target_modules=_targets(family) or _linear_layers(model, blocks),
        fan_in_fan_out=family == "gpt2",  # GPT-2 stores its matrices transposed
    )
    return get_peft_model(model, config)


def hold_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is frozen; adapters stay float32, which the optimizer steps.

    Whole numbers, such as the codes of a quantised base, stay as they are.
    """
    for param in model.parameters():
        if not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(dtype)


def _family(spec: AnyModel) -> str | None:
    """The family of the language model; ``None`` for a user's own."""
    assert not isinstance(spec, ImageModel), "cells see to it"
    if isinstance(spec, OwnModel):
        return None
    return spec.model_type if isinstance(spec, ConfiguredModel) else spec.family


def _targets(family: str | None) -> list[str]:
    """Modules to adapt: attention, or what peft adapts of the family; none if it knows none."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    tables: list[Mapping[Any, Sequence[str]]] = [ATTENTION, KNOWN]
    return next((list(table[family]) for table in tables if family in table), [])


def _linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Names of the matrices in the blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]


def check(model: nn.Module, cell: Cell, topology: Topology) -> None:
    """Raise ``ValueError`` on all ranks where pretrained weights or a user's own model differ.

    Each rank keeps a part of its own: parts of unequal models would make up another one.
    """
    spec = cell.model
    if isinstance(spec, OwnModel):
        key, what = "function", f"{spec.function} makes"
    elif isinstance(spec, ConfiguredModel) and spec.weights == "pretrained":
        key, what = "weights", f"{spec.config} has"
    else:
        return
    sums = [checksum(param.detach()) for param in model.parameters()]
    mine = checksum(torch.stack(sums)).item()
    every: list[int | None] = [None] * topology.world_size
    dist.all_gather_object(every, mine)
    others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
    if others:
        raise ValueError(
            f"{cell.origin.key('model', key)}: {what} other weights on rank {others[0]} than on "
            "rank 0; give all nodes the same files, and draw random numbers from torch alone, "
            "which is seeded alike on all ranks"
        )

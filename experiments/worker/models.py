"""Models from ``transformers`` configurations, with random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from experiments.records.cell import Cell
from simulation.transformer import ATTENTION, ModelSpec, Transformer


def build(cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The cell's model and its transformer blocks, with equal weights on every rank."""
    torch.manual_seed(cell.seed)
    model = _FAMILIES[cell.model.family](cell.model, cell.sequence_length)
    blocks: Sequence[nn.Module] = model.get_submodule(_BLOCKS[cell.model.family])
    if cell.tuning == "lora":
        model = _add_adapters(model, cell)
    return model, list(blocks)


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


def _add_adapters(model: Any, cell: Cell) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=cell.lora_rank,
            lora_alpha=2 * cell.lora_rank,
            target_modules=list(ATTENTION[cell.model.family]),
            fan_in_fan_out=cell.model.family == "gpt2",  # GPT-2 stores its matrices transposed
        ),
    )

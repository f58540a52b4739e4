"""Small models of several families of ``transformers``, as users save them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
#: By model_type; all have a vocabulary of 256 and take 64 tokens.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": _GROUPED,
    "opt": {**_SIZES, "word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.5},
    "mixtral": {**_GROUPED, "num_local_experts": 8, "attention_dropout": 0.5},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.5},
    "llama": {**_SIZES, "intermediate_size": 88},
}


def configuration(family: str) -> dict[str, Any]:
    """Content of the family's ``config.json``."""
    return {"model_type": family, "vocab_size": 256, **FAMILIES[family]}


def save(family: str, folder: Path, **options: Any) -> Any:
    """Save a model of the family, of random weights, as its users do; return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = configuration(family)
    torch.manual_seed(17)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(folder, **options)
    return model

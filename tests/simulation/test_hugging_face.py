"""Configurations against the real modules that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulation.models import from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "vocab_size": 100,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 48,
    "n_head": 6,
    "vocab_size": 100,
    "n_positions": 32,
}


def test_a_llama_configuration() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    model = from_config(config.to_dict(), 16)
    real = LlamaForCausalLM(config)
    assert model.parameters == sum(param.numel() for param in real.parameters())
    assert model.key_value_heads == 2


def test_a_gpt2_configuration_from_a_file(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=2, n_head=6)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    expected = sum(param.numel() for param in GPT2LMHeadModel(config).parameters())
    for source in (tmp_path, str(tmp_path / "config.json")):
        assert from_config(source, 32).parameters == expected
    with pytest.raises(ValueError, match=r"sequence_length = 64: .* allows up to 32"):
        from_config(tmp_path, 64)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model_type": "vit"}, "model_type = 'vit' of vit: transformers builds no causal"),
        ({"model_type": "llama"}, "num_hidden_layers of llama: is missing"),
        ({"model_type": ["llama"]}, r"model_type = \['llama'\] of .*: transformers builds"),
        (
            LLAMA | {"max_position_embeddings": "4096"},
            "max_position_embeddings of llama = '4096': must be a whole number",
        ),
        (LLAMA | {"hidden_size": 48.0}, "hidden_size of llama = 48.0: must be a whole number"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention = True of gpt2: is not"),
        (GPT2 | {"n_positions": "32"}, "n_positions of gpt2 = '32': must be a whole number"),
        ("no/such/path", "model = 'no/such/path': is no path that exists and no name"),
    ],
)
def test_what_is_no_known_configuration(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(source, 16)

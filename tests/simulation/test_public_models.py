"""Named models against what their makers publish, and closed forms against counted modules."""

from __future__ import annotations

from typing import Any

import pytest

from simulation.counted import count
from simulation.models import PUBLIC_MODELS, from_config, shape, usual_length
from simulation.transformer import Transformer, forward_flops

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CLOSED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "phi3": {},
}


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_parameters_are_as_published(name: str) -> None:
    assert shape(name, usual_length(name)).parameters == PUBLIC_MODELS[name].parameters


@pytest.mark.parametrize("kind", CLOSED)
def test_closed_forms_are_what_is_counted(kind: str) -> None:
    config = {"model_type": kind, **SMALL, **CLOSED[kind]}
    closed, counted = from_config(config, 16), count(kind, config, 16)
    assert closed.parameters == counted.parameters
    assert closed.block_parameters == counted.block_parameters
    assert forward_flops(closed, 16) == pytest.approx(forward_flops(counted, 16))
    assert closed.family == counted.family
    assert (closed.inner, closed.experts, closed.tied) == (
        counted.inner,
        counted.experts,
        counted.tied,
    )
    adapters = [
        model.layers * model.adapter_parameters(model.attention_lora(8))
        for model in (closed, counted)
    ]
    assert adapters[0] == adapters[1]


def test_what_travels_and_what_computes_of_experts() -> None:
    model = shape("mixtral-8x7b", 8192)
    travels = model.layers * sum(matrix.weights for matrix in model.matrices)
    computes = model.layers * sum(matrix.active_weights for matrix in model.matrices)
    assert travels == pytest.approx(46.4e9, rel=0.01)
    assert computes == pytest.approx(12.6e9, rel=0.01)
    assert [target for target in model.linear_lora(8).targets if "gate" in target] == []


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt_neox", "hidden_act": "gelu"},
        {"model_type": "olmo2"},
        {"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 32},
    ],
)
def test_others_are_counted(config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = {**SMALL, **config}
    model = from_config(whole, 16)
    said = dict(whole)
    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(said.pop("model_type"), **said))
    assert model.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert isinstance(model, Transformer)
    assert model.family == ("gpt2" if config["model_type"] == "gpt_neox" else "llama")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nosuch"}, "model_type = 'nosuch' of nosuch: transformers builds no"),
        ({"model_type": "t5"}, "model_type = 't5' of t5: transformers builds no causal"),
        ({"model_type": "mamba", **SMALL}, "state_size of mamba: attention of this kind"),
        (
            {"model_type": "deepseek_v3", **SMALL, "n_routed_experts": 8},
            "kv_lora_rank of deepseek_v3: attention of this kind is not modelled",
        ),
        (
            {"model_type": "qwen2_moe", **SMALL, "num_experts": 4, "mlp_only_layers": [0]},
            "blocks 0 and 1 of model.layers differ",
        ),
    ],
)
def test_unknown_structures_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config, 16)

"""Configurations of today's models, by what their makers publish, with numbers of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Today:
    """A published configuration: what of it says the shape."""

    config: Mapping[str, Any]
    #: Parameters of the language model in billions, as its makers round them.
    billions: float


_VISION = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "v_head_dim": 128,
    "vocab_size": 129280,
}
#: Blocks of Zamba2-7B with a shared transformer before their Mamba-2 mixer.
_HYBRID = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)

MODELS: Mapping[str, Today] = {
    "gemma-3-27b": Today(
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma3_text",
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "sliding_window": 1024,
            },
            "vision_config": _VISION,
        },
        27.0,
    ),
    "qwen3-235b-a22b": Today(
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 94,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
        },
        235.1,
    ),
    "gpt-oss-120b": Today(
        {
            "model_type": "gpt_oss",
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "quantization_config": {"quant_method": "mxfp4"},
            "sliding_window": 128,
            "vocab_size": 201088,
        },
        116.8,
    ),
    "llama-4-scout": Today(
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "attention_chunk_size": 8192,
                "head_dim": 128,
                "hidden_size": 5120,
                "interleave_moe_layer_step": 1,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "max_position_embeddings": 10485760,
                "num_attention_heads": 40,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "num_local_experts": 16,
                "vocab_size": 202048,
            },
            "vision_config": {"model_type": "llama4_vision_model"},
        },
        107.8,
    ),
    "deepseek-v3": Today({"model_type": "deepseek_v3", **_DEEPSEEK}, 671.0),
    "kimi-k2": Today(
        {
            "model_type": "kimi_k2",
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            **_DEEPSEEK,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "vocab_size": 163840,
        },
        1026.0,
    ),
    "jamba-v0.1": Today(
        {
            "model_type": "jamba",
            "attn_layer_offset": 4,
            "attn_layer_period": 8,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_dt_rank": 256,
            "mamba_expand": 2,
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65536,
        },
        51.6,
    ),
    "zamba2-7b": Today(
        {
            "model_type": "zamba2",
            "adapter_rank": 128,
            "attention_head_dim": 224,
            "attention_hidden_size": 7168,
            "hidden_size": 3584,
            "hybrid_layer_ids": list(_HYBRID),
            "intermediate_size": 14336,
            "layers_block_type": ["hybrid" if at in _HYBRID else "mamba" for at in range(81)],
            "mamba_d_state": 64,
            "mamba_expand": 2,
            "mamba_headdim": 64,
            "mamba_ngroups": 2,
            "max_position_embeddings": 4096,
            "n_mamba_heads": 112,
            "num_attention_heads": 32,
            "num_hidden_layers": 81,
            "num_key_value_heads": 32,
            "num_mem_blocks": 2,
            "use_mem_rope": True,
            "use_shared_attention_adapter": False,
            "vocab_size": 32000,
        },
        7.36,
    ),
    "mistral-small-3.1-24b": Today(
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
        },
        23.6,
    ),
    "glm-4.5": Today(
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "first_k_dense_replace": 3,
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 92,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "use_qk_norm": True,
            "vocab_size": 151552,
        },
        353.0,
    ),
}

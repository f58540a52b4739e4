"""Well-known models by name: what their public configurations say, as ``config.json`` has it.

Facts from the models' own repositories on the Hugging Face hub (the names beside them), and the
length of the sequences that most of their training saw, by their makers' reports. Numbers of
parameters are what their makers publish; a test compares them with what is counted from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PublicModel:
    """A configuration, where it is from, and how the model was trained."""

    hub: str
    parameters: int
    #: Tokens per sequence in most of its training, at most 8,192: ours where it was more.
    training_length: int
    config: Mapping[str, Any]


def _llama(
    kind: str,
    layers: int,
    width: int,
    heads: int,
    key_value_heads: int,
    mlp_width: int,
    vocabulary: int,
    limit: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "intermediate_size": mlp_width,
        "vocab_size": vocabulary,
        "max_position_embeddings": limit,
        **more,
    }


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
PUBLIC_MODELS: Mapping[str, PublicModel] = {
    "llama-2-7b": PublicModel(
        "meta-llama/Llama-2-7b-hf",
        6_738_415_616,
        4096,
        _llama("llama", 32, 4096, 32, 32, 11008, 32_000, 4096),
    ),
    "llama-2-70b": PublicModel(
        "meta-llama/Llama-2-70b-hf",
        68_976_648_192,
        4096,
        _llama("llama", 80, 8192, 64, 8, 28672, 32_000, 4096),
    ),
    "llama-3-8b": PublicModel(
        "meta-llama/Meta-Llama-3-8B",
        8_030_261_248,
        8192,
        _llama("llama", 32, 4096, 32, 8, 14336, 128_256, 8192),
    ),
    "llama-3-70b": PublicModel(
        "meta-llama/Meta-Llama-3-70B",
        70_553_706_496,
        8192,
        _llama("llama", 80, 8192, 64, 8, 28672, 128_256, 8192),
    ),
    "qwen2-7b": PublicModel(
        "Qwen/Qwen2-7B",
        7_615_616_512,
        4096,
        _llama("qwen2", 28, 3584, 28, 4, 18944, 152_064, 131_072),
    ),
    "qwen2.5-32b": PublicModel(
        "Qwen/Qwen2.5-32B",
        32_763_876_352,
        4096,
        _llama("qwen2", 64, 5120, 40, 8, 27648, 152_064, 131_072),
    ),
    "mistral-7b": PublicModel(
        "mistralai/Mistral-7B-v0.1",
        7_241_732_096,
        8192,
        _llama("mistral", 32, 4096, 32, 8, 14336, 32_000, 32_768),
    ),
    "mixtral-8x7b": PublicModel(
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        8192,
        _llama("mixtral", 32, 4096, 32, 8, 14336, 32_000, 32_768, **_MIXTRAL),
    ),
    "gemma-2b": PublicModel(
        "google/gemma-2b",
        2_506_172_416,
        8192,
        _llama("gemma", 18, 2048, 8, 1, 16384, 256_000, 8192, head_dim=256),
    ),
    "gemma-7b": PublicModel(
        "google/gemma-7b",
        8_537_680_896,
        8192,
        _llama("gemma", 28, 3072, 16, 16, 24576, 256_000, 8192, head_dim=256),
    ),
    "phi-3-mini": PublicModel(
        "microsoft/Phi-3-mini-4k-instruct",
        3_821_079_552,
        4096,
        _llama("phi3", 32, 3072, 32, 32, 8192, 32_064, 4096),
    ),
    "phi-4": PublicModel(
        "microsoft/phi-4",
        14_659_507_200,
        4096,
        _llama("phi3", 40, 5120, 40, 10, 17920, 100_352, 16_384),
    ),
}

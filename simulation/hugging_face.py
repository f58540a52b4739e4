"""The shape of a model from its Hugging Face configuration, without building it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulation import checks
from simulation.transformer import Family, Transformer

_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "vocabulary": "vocab_size",
    "head_width": "head_dim",
}
_MIXTRAL = {**_LLAMA, "experts": "num_local_experts", "active_experts": "num_experts_per_tok"}
#: The keys of a Hugging Face configuration, by ``model_type``, of models with a closed form.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "mlp_width": "n_inner",
        "vocabulary": "vocab_size",
        "positions": "n_positions",
    },
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"), _LLAMA),
    "mixtral": _MIXTRAL,
}
#: Keys that a configuration need not have.
_OPTIONAL = ("mlp_width", "key_value_heads", "head_width")
#: What is not counted here; a model that is counted has none of it, or false.
_NOT_COUNTED: Mapping[str, tuple[str, ...]] = {"gpt2": ("add_cross_attention",)}
#: What other families have beside what a Llama has.
_MORE: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"biased": ("q_proj", "k_proj", "v_proj")},
    "gemma2": {"norms": 4},
    "phi3": {"joined": True},
}
#: Matrices with a bias where the key says so.
_BIASES = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
#: Families whose output layer is the embedding, unless the configuration says otherwise; and those
#: whose heads have this width, whatever the width of the model.
_TIED = ("gpt2", "gemma", "gemma2")
_HEAD_WIDTHS = {"qwen3": 128, "gemma": 256, "gemma2": 256}


def from_config(source: Mapping[str, Any] | str | Path, sequence_length: int) -> Transformer:
    """The shape that a Hugging Face configuration describes.

    ``source`` is a mapping (``LlamaConfig(...).to_dict()``), the path of a ``config.json`` or of
    the directory that has it, or a name on the hub whose configuration is cached or can be
    fetched. What has no closed form here is built by ``transformers`` without its weights, and
    counted. Raises ``ValueError`` for a value that cannot be, and for what is not counted.
    """
    name, config = _named(source)
    kind: Any = config.get("model_type")
    if kind not in tuple(_KEYS):  # which a list may be compared with, too
        from simulation.counted import count  # needs torch

        return count(name, config, sequence_length)
    keys = _KEYS[kind]
    missing = [
        key for field, key in keys.items() if config.get(key) is None and field not in _OPTIONAL
    ]
    if missing:
        raise ValueError(f"{missing[0]} of {name}: is missing from the configuration")
    limit = keys.get("positions", "max_position_embeddings")
    given = {key: config[key] for key in (*keys.values(), limit) if config.get(key) is not None}
    checks.counts(**{f"{key} of {name}": value for key, value in given.items()})
    for key in _NOT_COUNTED.get(kind, ()):
        if config.get(key):
            raise ValueError(
                f"{key} = {config[key]!r} of {name}: is not modelled; allowed is false"
            )
    shape: dict[str, Any] = {field: given.get(key) for field, key in keys.items()}
    if kind == "gpt2":
        shape["mlp_width"] = shape["mlp_width"] or 4 * shape["width"]
    elif shape["mlp_width"] is None:
        raise ValueError(f"{keys['mlp_width']} of {name}: is missing from the configuration")
    else:
        shape |= _of_llama_s_kind(kind, config, shape)
    shape["key_value_heads"] = shape.get("key_value_heads") or shape["heads"]
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    if sequence_length > given.get(limit, sequence_length):
        raise ValueError(f"sequence_length = {sequence_length}: {name} allows up to {given[limit]}")
    family: Family = "gpt2" if kind == "gpt2" else "llama"
    return Transformer(name=name, family=family, tied=tied, **shape)


def _of_llama_s_kind(
    kind: str, config: Mapping[str, Any], shape: Mapping[str, Any]
) -> dict[str, Any]:
    """What a family of Llama's kind has of its own."""
    more = dict(_MORE.get(kind, {}))
    biased = [name for key, names in _BIASES.items() if config.get(key) for name in names]
    more["biased"] = (*more.get("biased", ()), *biased)
    more["head_width"] = shape["head_width"] or _HEAD_WIDTHS.get(kind)
    if kind == "qwen3":
        more["vectors"] = (more["head_width"],) * 2
    return more


def _named(source: Mapping[str, Any] | str | Path) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return str(source.get("_name_or_path") or source.get("model_type") or "model"), source
    path = Path(source)
    return path.stem if path.exists() else str(source), read(source)


def read(source: str | Path) -> dict[str, Any]:
    """What the configuration says; ``source`` is as of ``from_config``.

    Raises ``ValueError`` where there is none.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        file = _from_hub(str(source))
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model = {str(source)!r}: {file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model = {str(source)!r}: {file} holds no configuration")
    return config


def _from_hub(name: str) -> Path:
    """The configuration of a model on the hub, from the local cache if it is there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=10))
    except HFValidationError:
        reason = "is no path that exists and no name on the hub"
    except Exception as error:
        reason = f"is no path, and could not be had from the hub ({type(error).__name__})"
    raise ValueError(
        f"model = {name!r}: {reason}; give the path of its config.json, or a name whose "
        "configuration is cached or can be fetched"
    )

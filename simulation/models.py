"""The shape of a model by name, by its Hugging Face configuration, or as the paper has it.

The paper derives GPT models of 10B, 20B and 30B parameters from GPT-2 XL and does not give their
depth and width. Our choice: GPT-2 XL's 48 layers, heads of 64 and vocabulary, and a width that
gives the size. For 30B the width is such that one forward gather of ZeRO-3 on two nodes of eight
ranks sends what the paper's table says FCDP-Sched's sends (108.18 GB: 2 nodes × 15/16 × 2 bytes per
parameter, so 28.8 billion).

Well-known models have their public configurations in ``models.csv``, from their own repositories on
the Hugging Face hub, and the length of the sequences that most of their training saw, by their
makers' reports. Numbers of parameters are what their makers publish; a test compares them with what
is counted from these.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulation import checks
from simulation.files import rows_of
from simulation.transformer import Family, ModelSpec, Transformer

#: Tokens per sequence: our choice; questions with their paragraphs in SQuAD mostly fit in it.
SEQUENCE_LENGTH = 512
#: GPT-2's vocabulary.
_VOCABULARY = 50_257
_LAYERS = 48
_HEAD_WIDTH = 64
_WIDTHS = {"gpt-10b": 4096, "gpt-20b": 5888, "gpt-30b": 7040}

#: The models by name: 9.9, 20.3 and 28.9 billion parameters.
PAPER_MODELS: dict[str, ModelSpec] = {
    name: ModelSpec(
        name=name,
        family="gpt2",
        layers=_LAYERS,
        width=width,
        heads=width // _HEAD_WIDTH,
        vocabulary=_VOCABULARY,
    )
    for name, width in _WIDTHS.items()
}
_LLAMA = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "vocabulary": "vocab_size",
    "head_width": "head_dim",
}
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
    "mixtral": {**_LLAMA, "experts": "num_local_experts", "active_experts": "num_experts_per_tok"},
}
#: Keys that a configuration need not have.
_OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
#: Features of other families beside those of a Llama.
_MORE: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"biased": ("q_proj", "k_proj", "v_proj")},
    "gemma2": {"norms": 4},
    "mixtral": {"fused": True},
    "phi3": {"joined": True},
}
#: Families all of whose blocks attend to a window, if they say one.
_WINDOWS = ("mistral", "mixtral", "phi3")
#: Matrices with a bias where the key says so.
_BIASES = {
    "attention_bias": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
#: Families whose output layer is the embedding, unless the configuration says otherwise; and those
#: whose heads have this width, whatever the width of the model.
_TIED = ("gpt2", "gemma", "gemma2")
_HEAD_WIDTHS = {"qwen3": 128, "gemma": 256, "gemma2": 256}
#: Keys of the language model's part of a configuration.
_LANGUAGE = ("text_config", "language_config", "llm_config", "thinker_config")
#: Seconds that the hub has for an answer.
_ANSWERS_S = 2
#: Most tokens per sequence of a configuration where nobody named a length: ours.
_LONGEST = 8192


def find(name: str) -> ModelSpec:
    """The model of this name. Raises ``ValueError`` for one that is not among ``PAPER_MODELS``."""
    checks.one_of("model", name, PAPER_MODELS)
    return PAPER_MODELS[name]


@dataclass(frozen=True)
class PublicModel:
    """A configuration, and how the model was trained."""

    parameters: int
    #: Tokens per sequence in most of its training, at most 8,192: ours where it was more.
    training_length: int
    #: Its name on the hub.
    hub: str
    config: Mapping[str, Any]


#: Columns of the table that are no part of a configuration.
_ABOUT = ("name", "hub", "parameters", "training_length")

PUBLIC_MODELS = {
    row["name"]: PublicModel(
        int(row["parameters"]),
        int(row["training_length"]),
        row["hub"],
        {
            key: int(value) if value.isdecimal() else value
            for key, value in row.items()
            if key not in _ABOUT
        },
    )
    for _, row in rows_of(Path(__file__).with_name("models.csv"))
}

#: Names of the tables by those that people type, in small letters: on the hub, too.
_NAMES = {name.lower(): name for name in PAPER_MODELS} | {
    typed.lower(): name
    for name, model in PUBLIC_MODELS.items()
    for typed in (name, model.hub, model.hub.rpartition("/")[2])
}


def from_config(source: Mapping[str, Any] | str | Path, sequence_length: int) -> Transformer:
    """The shape that a Hugging Face configuration describes.

    ``source`` is a mapping (``LlamaConfig(...).to_dict()``), the path of a ``config.json`` or of
    the directory that has it, or a name on the hub whose configuration is cached or can be
    fetched. What has no closed form here is built by ``transformers`` without its weights, and
    counted. Raises ``ValueError`` for a value that cannot be, and for what is not counted.
    """
    if isinstance(source, Mapping):
        name, config = (
            str(source.get("_name_or_path") or source.get("model_type") or "model"),
            source,
        )
    else:
        path = Path(source)
        name = path.stem if path.is_file() else path.name if path.is_dir() else str(source)
        config = read(source)
    part = language(config)
    kind: Any = config.get("model_type")
    # A part may leave out what is as its class has it; and ``kind`` may be a list: no lookup.
    if part is not config or kind not in tuple(_KEYS):
        from simulation.counted import count  # needs torch

        return count(name, part, sequence_length)
    keys = _KEYS[kind]
    missing = [k for k in keys.values() if config.get(k) is None and k not in _OPTIONAL]
    if missing:
        raise ValueError(f"{missing[0]} of {name}: is missing from the configuration")
    limit = keys.get("positions", "max_position_embeddings")
    sizes = {key: config[key] for key in (*keys.values(), limit) if config.get(key) is not None}
    checks.counts(**{f"{key} of {name}": value for key, value in sizes.items()})
    if kind == "gpt2" and (crossed := config.get("add_cross_attention")):
        raise ValueError(
            f"add_cross_attention = {crossed!r} of {name}: is not modelled; allowed is false"
        )
    shape: dict[str, Any] = {field: sizes.get(key) for field, key in keys.items()}
    if kind == "gpt2":
        shape["mlp_width"] = shape["mlp_width"] or 4 * shape["width"]
    else:
        shape |= _of_llama_s_kind(kind, config, shape)
    shape["key_value_heads"] = shape.get("key_value_heads") or shape["heads"]
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    if sequence_length > sizes.get(limit, sequence_length):
        raise ValueError(f"sequence_length = {sequence_length}: {name} allows up to {sizes[limit]}")
    family: Family = "gpt2" if kind == "gpt2" else "llama"
    return Transformer(name=name, family=family, tied=tied, longest=sizes.get(limit), **shape)


def _of_llama_s_kind(
    kind: str, config: Mapping[str, Any], shape: Mapping[str, Any]
) -> dict[str, Any]:
    """Values in which a family of Llama's kind differs from Llama."""
    more = dict(_MORE.get(kind, {}))
    biased = [name for key, names in _BIASES.items() if config.get(key) for name in names]
    more["biased"] = (*more.get("biased", ()), *biased)
    more["head_width"] = shape["head_width"] or _HEAD_WIDTHS.get(kind)
    if kind in _WINDOWS:
        more["window"] = config.get("sliding_window")
    if kind == "qwen3":
        more["vectors"] = ((more["head_width"], 1),) * 2
    return more


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration that has other parts, too, or all of it."""
    part = next((config[key] for key in _LANGUAGE if isinstance(config.get(key), Mapping)), None)
    if part is None:
        return config
    whole = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**whole, **language(part)}


def read(source: str | Path) -> dict[str, Any]:
    """The configuration's values; ``source`` is as of ``from_config``.

    Raises ``ValueError`` where there is none.
    """
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        try:
            downloaded = from_hub(str(source), "config.json", fetch=True)
        except ValueError as error:
            raise ValueError(f"model = {error}") from error
        assert downloaded is not None
        file = downloaded
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model = {str(source)!r}: {file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model = {str(source)!r}: {file} holds no configuration")
    return config


def from_hub(name: str, *files: str, fetch: bool = False) -> Path | None:
    """The first of these files that a name on the hub has, if it is cached or to be ``fetch``ed.

    Raises ``ValueError`` where none is in the local cache, and the hub has none or is not reached.
    The hub is asked once: a mistyped path must not wait long for an answer.
    """
    # Takes long to import.
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    if (cached := _in_cache(name, *files)) is not None:
        return cached
    try:
        for file in files:
            with suppress(errors.EntryNotFoundError):
                get_hf_file_metadata(hf_hub_url(name, file), timeout=_ANSWERS_S)
                return Path(hf_hub_download(name, file)) if fetch else None
        reason = f"has no {' or '.join(files)}"
    except errors.HFValidationError:
        reason = "is no path that exists and no name on the hub"
    except Exception as error:
        reason = f"is no path, and could not be had from the hub ({type(error).__name__})"
    raise ValueError(f"{name!r}: {reason}; give a path, or a name that is cached or can be fetched")


def shape(model: str, sequence_length: int) -> Transformer:
    """The model of this name. Nothing is fetched: a plan must not wait for a network.

    Raises ``ValueError`` naming what is allowed.
    """
    model = _named(model)
    if model in PAPER_MODELS:
        return Transformer.of(PAPER_MODELS[model], sequence_length)
    if model in PUBLIC_MODELS:
        named = {**PUBLIC_MODELS[model].config, "_name_or_path": model}
        return from_config(named, sequence_length)
    return from_config(_path(model), sequence_length)


def usual_length(model: str) -> int:
    """Tokens per sequence that the model is usually trained on.

    It is the paper's or its makers'; by a configuration the length that it allows, at most
    ``_LONGEST``: models that allow more were mostly trained on less. Raises as ``shape``.
    """
    model = _named(model)
    if model in PAPER_MODELS:
        return SEQUENCE_LENGTH
    if model in PUBLIC_MODELS:
        return PUBLIC_MODELS[model].training_length
    config = language(read(_path(model)))
    scaled = config.get("rope_scaling") or config.get("rope_parameters")
    first = scaled.get("original_max_position_embeddings") if isinstance(scaled, dict) else None
    allowed = first, from_config(_path(model), 1).longest
    lengths = [length for length in allowed if isinstance(length, int) and length > 0]
    return min(_LONGEST, *lengths) if lengths else SEQUENCE_LENGTH


def _named(model: str) -> str:
    """The tables' name of a model, if it is in one and no path."""
    return model if Path(model).exists() else _NAMES.get(model.lower(), model)


def _path(model: str) -> Path:
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model = {model!r}: the folder has no config.json")
    source = path if path.exists() else _in_cache(model, "config.json")
    if source is None:
        known = ", ".join((*PAPER_MODELS, *PUBLIC_MODELS))
        raise ValueError(
            f"model = {model!r}: allowed are {known}, the path "
            "of a Hugging Face config.json or of its folder, or a name on the hub whose "
            f"configuration is in the local cache (hf download {model} config.json)"
        )
    return source


def _in_cache(name: str, *files: str) -> Path | None:
    """The first of these files of a name on the hub that is in the local cache."""
    from huggingface_hub import errors, try_to_load_from_cache  # slow

    with suppress(errors.HFValidationError):
        for file in files:
            if isinstance(cached := try_to_load_from_cache(name, file), str):
                return Path(cached)
    return None

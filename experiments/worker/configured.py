"""Causal language models of ``transformers`` by their configuration, and users' own functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn as nn

from experiments.records.cell import Cell
from experiments.records.workload import ConfiguredModel, OwnModel
from fcdp.arguments import blocks_of
from fcdp.blocks import find_blocks

#: Characters of a library's error that are quoted.
_LONGEST = 300


def configured(spec: ConfiguredModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The model that ``transformers`` makes of the configuration, and its blocks, in float32.

    Raises ``ValueError`` naming line and key for a configuration that it does not know or cannot
    build, for weights that are not there, and for a model without blocks.
    """
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    where = cell.origin.key("model", "config")
    config = _configuration(spec, where)
    # Tokens of these, such as BERT, see those after them too, unless their configuration says so.
    causal = config.is_encoder_decoder or any(
        getattr(config, name, False) for name in ("is_decoder", "causal")
    )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not causal:
        raise ValueError(
            f"{where}: {spec.config} is of model_type {spec.model_type!r}, whose tokens see those "
            "that they are to predict; allowed are causal families, such as gpt2, and this one "
            "with is_decoder: true"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and cell.sequence_length > longest:
        raise ValueError(
            f"{where}: {spec.config} allows sequences of up to {longest} tokens, and "
            f"sequence_length is {cell.sequence_length}"
        )
    if spec.weights == "pretrained":
        model = _pretrained(spec, config, cell)
    else:
        try:
            model = auto.from_config(config, dtype=torch.float32)
        except Exception as error:  # each family refuses what it cannot build in its own way
            raise ValueError(
                f"{where}: transformers cannot build {spec.config}, of model_type "
                f"{spec.model_type!r}, as a causal language model: {brief(error)}"
            ) from error
    return model.train(), _blocks(model, where)


def own(spec: OwnModel, cell: Cell) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Call the user's function: it makes the model and its blocks.

    Raises ``ValueError`` naming line and key for a function that is not there or returns anything
    else. What it raises itself passes through.
    """
    where = cell.origin.key("model", "function")
    must = f"{spec.function} must return a tuple of the model and its blocks, at least 1"
    try:
        made = find_function(spec.function, where)(cell.sequence_length)
    except SystemExit as error:
        raise ValueError(f"{where}: {must}; it has ended the program") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ValueError(f"{where}: {must}; it returned a {type(made).__name__}")
    model, given = made
    try:
        found = [] if given is None else blocks_of(model, given)
    except ValueError as error:
        raise ValueError(f"{where}: {must}; {str(error).replace('units', 'blocks')}") from error
    if not found:
        raise ValueError(f"{where}: {must}; it returned none")
    return model, found


def brief(error: Exception) -> str:
    """A library's error in one line that is not too long: it may name all that there is."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def vocabulary(model: Any) -> int | None:
    """Tokens that the model has embeddings of; ``None`` where it does not say."""
    if not hasattr(model, "get_input_embeddings"):
        return None
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        return None


def _configuration(spec: ConfiguredModel, where: str) -> Any:
    """The configuration without dropout, as strategies must see the same losses."""
    from transformers import AutoConfig

    said = {name: value for name, value in spec.configuration.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(spec.model_type, **said)
    except Exception as error:  # of types and values, from wherever the family checks them
        raise ValueError(
            f"{where}: transformers does not know {spec.config}, of model_type "
            f"{spec.model_type!r}: {brief(error)}"
        ) from error
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _pretrained(spec: ConfiguredModel, config: Any, cell: Cell) -> Any:
    """The model with its weights, from safetensors alone: nothing pickled is opened."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    where = cell.origin.key("model", "weights")
    source = cell.origin.source(spec.config, where)
    if Path(source).is_file():
        source = str(Path(source).parent)
    try:
        model, loaded = auto.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of files, of the network, of shapes
        raise ValueError(
            f"{where}: no pretrained weights of {spec.config} on this node: {brief(error)}"
        ) from error
    lacking = sorted([*loaded["missing_keys"], *map(str, loaded["mismatched_keys"])])
    if lacking:
        raise ValueError(
            f"{where}: {spec.config} has no weights for {len(lacking)} parameters of its "
            f"configuration, such as {lacking[0]}"
        )
    return model


def _blocks(model: nn.Module, where: str) -> list[nn.Module]:
    try:
        return find_blocks(model)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix('units: ')}") from error


def find_function(name: str, where: str) -> Callable[..., Any]:
    """The function "package.module:function" that the matrix file names at ``where``.

    Raises ``ValueError`` where there is none.
    """
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except (ImportError, SystemExit) as error:
        raise ValueError(
            f"{where}: {module} cannot be imported: {error}; each node imports it from the folder "
            "that ranks start in, this repository's, or from installed packages"
        ) from error
    if not callable(found):
        raise ValueError(f"{where}: {module} has no function {function!r}")
    return cast(Callable[..., Any], found)

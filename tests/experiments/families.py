"""Small models of several families of ``transformers``, as users save them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.experiments.golden import tables

#: By model_type; all have a vocabulary of 256 and take 64 tokens.
FAMILIES: Mapping[str, Mapping[str, Any]] = tables(__file__)


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

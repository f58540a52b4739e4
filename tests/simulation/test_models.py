"""Shapes by name and by configuration, against real modules and what their makers publish."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.worker import models
from simulation.counted import count
from simulation.models import (
    PAPER_MODELS,
    PUBLIC_MODELS,
    SEQUENCE_LENGTH,
    find,
    from_config,
    shape,
    usual_length,
)
from simulation.transformer import Transformer
from simulation.workload import Workload, token_work
from tests.experiments.cells import cell
from tests.experiments.golden import tables
from tests.simulation.test_today import built

#: Small configurations.
CONFIGURATIONS = tables(__file__)
SMALL, CLOSED = CONFIGURATIONS["small"], CONFIGURATIONS["closed"]


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_name_says_the_parameters_within_five_per_cent(name: str) -> None:
    with torch.device("meta"):
        model, _ = models.build(cell("fcdp", model=find(name), sequence_length=SEQUENCE_LENGTH))
    parameters = sum(param.numel() for param in model.parameters())
    assert parameters == pytest.approx(float(name[4:-1]) * 1e9, rel=0.05)


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_parameters_are_as_published(name: str) -> None:
    assert shape(name, usual_length(name)).parameters == PUBLIC_MODELS[name].parameters


@pytest.mark.parametrize("kind", CLOSED)
def test_closed_forms_are_what_is_counted(kind: str) -> None:
    config = {"model_type": kind, **SMALL, **CLOSED[kind]}
    closed, counted = from_config(config, 16), count(kind, config, 16)
    assert closed.parameters == counted.parameters
    assert closed.block_parameters == counted.block_parameters
    sizes = {"sequence_length": 16, "micro_batch": 1}
    flops, adapters = [], []
    for model in (closed, counted):
        flops.append(token_work(Workload(strategy="fsdp2", model=model, **sizes)).flops)
        adapters.append(model.layers * model.adapter_parameters(model.lora(8)))
    assert flops[0] == pytest.approx(flops[1])
    assert adapters[0] == adapters[1]
    for name in ("family", "inner", "experts", "tied"):
        assert getattr(closed, name) == getattr(counted, name), name


def test_routers_have_no_adapters() -> None:
    assert not [of for of in shape("mixtral-8x7b", 8192).lora(8, "all").targets if "gate" in of]


def test_a_token_attends_to_no_more_than_the_window() -> None:
    """The mean of ``min(i, window)`` over a sequence's tokens, twice, as trainers count."""
    model = shape("mistral-7b", 8192)
    assert model.window == 4096
    causal = sum(min(token, 4096) for token in range(8192)) / 8192
    assert model.attended(8192) == pytest.approx(2 * causal, rel=1e-3)
    assert model.attended(4096) == replace(model, window=None).attended(4096) == 4096


@pytest.mark.parametrize("config", CONFIGURATIONS["counted"])
def test_others_are_counted(config: dict[str, Any]) -> None:
    model = from_config(SMALL | config, 16)
    assert model.parameters == sum(p.numel() for p in built(SMALL | config).parameters())
    assert isinstance(model, Transformer)
    assert model.family == ("gpt2" if config["model_type"] == "gpt_neox" else "llama")


def test_a_folder_s_name_may_have_a_dot(tmp_path: Path) -> None:
    """A refusal names the model by its folder: DeepSeek-V3.2 is no DeepSeek-V3."""
    folder = tmp_path / "deepseek-v3.2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"of deepseek-v3\.2: is missing"):
        from_config(folder, 64)

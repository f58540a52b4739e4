"""Stages as the executor cuts real models, and what it sends of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.cyclic.stages import chosen_runs, parameters, split
from baselines.strategy import numel
from experiments.records.modelled import workload_of
from experiments.worker import models
from simulation.cycle import stages_of
from simulation.models import from_config
from simulation.workload import Workload
from tests.experiments.cells import cell, model_spec
from tests.simulation.workloads import workload

RANKS = 4


@pytest.mark.parametrize("stages", [None, 1, 3])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_messages_have_the_parameters_of_real_stages(
    family: Literal["gpt2", "llama"], tuning: str, stages: int | None
) -> None:
    of = cell(
        "cyclic-zero", model=model_spec(family, layers=5, width=64), tuning=tuning, stages=stages
    )
    model, blocks = models.build(of)
    runs = chosen_runs(stages, blocks, RANKS, "ranks")
    every = parameters(model, blocks, runs, frozen=True)
    trained = [numel(params) for params in parameters(model, blocks, runs)]
    passed = [numel(split(params, blocks)[1]) for params in every]
    found = stages_of(workload_of(of), RANKS)
    assert found.blocks == tuple(map(len, runs))
    assert found.sizes(twice=True) == {
        "forward": tuple(map(numel, every)),
        "backward": passed,
        "gradient": tuple(trained),
        "sum": tuple(trained),
    }
    assert found.sizes(twice=False)["forward"] == tuple(trained)


def test_embeddings_of_a_counted_model_come_before_its_blocks() -> None:
    spec = {"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256}
    spec |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    counted = from_config({**spec, "tie_word_embeddings": False}, 64)
    assert counted.embedded_parameters == 256 * 64
    assert counted.root_parameters == 2 * 256 * 64 + 64


@given(st.integers(1, 8), st.integers(1, 6), st.sampled_from(["v1", "v2"]))
def test_what_is_late_are_the_stages_that_a_micro_batch_comes_to_too_early(
    ranks: int, stages: int, rule: Literal["v1", "v2"]
) -> None:
    found = stages_of(workload("cyclic", stages=min(stages, ranks)), ranks)
    late = [found.late(rule, rank) for rank in range(ranks)]
    assert late == sorted(late, reverse=True)
    assert late[0] == sum(found.trained) - (found.trained[-1] if rule == "v2" else 0)
    assert late[-1] == (0 if rule == "v2" else sum(found.trained))


@pytest.mark.parametrize(
    ("strategy", "settings", "said"),
    [
        ("cyclic-ring", {"stages": 7}, "stages = 7: allowed are 1 to 4, as there are 4 ranks"),
        ("cyclic-ring", {"accumulation": 2}, "accumulation = 2: allowed is 1"),
        (
            "cyclic-interleaved",
            {"accumulation": 9, "stages": None},
            "stages = 9: allowed are 1 to 6, as there are 9 micro-batches",
        ),
    ],
)
def test_what_the_executor_refuses_is_refused(
    strategy: str, settings: dict[str, Any], said: str
) -> None:
    given_workload = replace(workload(strategy), **settings)
    with pytest.raises(ValueError, match=said):
        stages_of(given_workload, RANKS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"rule": "dp"}, "rule = 'dp': allowed are v1, v2"), ({"stages": 0}, "stages = 0: must be")],
)
def test_settings_that_cannot_be_name_field_and_value(settings: dict[str, Any], said: str) -> None:
    known: Workload = workload("cyclic")
    with pytest.raises(ValueError, match=said):
        replace(known, **settings)

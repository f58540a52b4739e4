"""A pipeline trains as FSDP2 does, by every schedule, and sends what its closed form says."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from baselines.settings import PipelineSchedule, PipelineSettings, Settings
from tests.baselines.pipeline.training import Result, Run, kept, sent, trained
from tests.baselines.training import SEQUENCE_LENGTH
from tests.ranks import Pools
from tests.tiers import in_ci

TWO = {"stages_per_node": 2}
GROUPS = {"within_stage": "fcdp", "nodes_per_stage": 2}
GPT2, LLAMA = Run(2, 2, 1, "gpt2", "full"), Run(2, 2, 4, "llama", "lora")
HALF, HEAD = Run(2, 2, 8, "gpt2", "half"), Run(2, 1, 2, "llama", "head")
THREE = Run(3, 1, 1, "gpt2", "full", layers=6)
LORA = Run(3, 1, 3, "gpt2", "lora", layers=6)
FOUR = Run(4, 1, 2, "llama", "full", layers=8)
LAST_HALF = Run(4, 1, 2, "gpt2", "half", layers=8)
CASES = [
    (GPT2, {"pipeline_schedule": "ahead"}),
    in_ci(GPT2, {"pipeline_schedule": "interleaved", **TWO}),
    in_ci(GPT2, {"within_stage": "replicated"}),
    in_ci(LLAMA, {"pipeline_schedule": "zb", **TWO}),
    in_ci(HALF, {"pipeline_schedule": "gpipe"}),
    in_ci(HALF, {"pipeline_schedule": "looped", **TWO}),
    in_ci(THREE, {"pipeline_schedule": "1f1b"}),
    (THREE, {"pipeline_schedule": "ahead"}),
    (LORA, {"pipeline_schedule": "interleaved", **TWO}),
    in_ci(FOUR, {"pipeline_schedule": "zb", **TWO}),
    in_ci(LAST_HALF, {"pipeline_schedule": "looped", **TWO}),
    in_ci(LAST_HALF, {"pipeline_schedule": "zb", **TWO}),
    in_ci(HEAD, {"pipeline_schedule": "ahead"}),
    (HEAD, {"pipeline_schedule": "zb"}),
    in_ci(Run(1, 2, 1, "gpt2", "full"), {}),
    (Run(4, 1, 2, "gpt2", "full"), GROUPS),
    in_ci(Run(4, 1, 2, "gpt2", "lora"), GROUPS | {"partial_gradients": "host"}),
    in_ci(Run(4, 1, 4, "gpt2", "half"), GROUPS | {"partial_gradients": "each"}),
    in_ci(FOUR, GROUPS | {"pipeline_schedule": "looped", **TWO}),
    in_ci(LAST_HALF, GROUPS | {"pipeline_schedule": "interleaved", **TWO}),
    in_ci(LAST_HALF, {"within_stage": "fcdp"}),
    (LLAMA, {"within_stage": "fcdp", "pipeline_schedule": "gpipe"}),
    in_ci(GPT2, GROUPS),
    in_ci(Run(4, 2, 2, "gpt2", "full"), GROUPS),
    (Run(4, 1, 2, "normalised", "full"), GROUPS | {"pipeline_schedule": "zb"}),
    in_ci(FOUR, GROUPS | {"pipeline_schedule": "zb", **TWO}),
    in_ci(Run(4, 1, 4, "gpt2", "half"), GROUPS | {"pipeline_schedule": "zb"}),
    in_ci(LLAMA, {"within_stage": "fcdp", "pipeline_schedule": "zb"}),
    in_ci(
        Run(2, 2, 2, "llama", "full", checkpointed=True),
        {"within_stage": "fcdp", "pipeline_schedule": "zb"},
    ),
]


def mean_losses(results: Sequence[Result]) -> np.ndarray:
    return np.mean([result.losses for result in results], axis=0)


@functools.cache
def by_fsdp2(ranks: Pools, run: Run) -> list[Result]:
    return ranks.run(run.world_size, trained, run, "fsdp2", Settings())


@pytest.mark.parametrize(("run", "settings"), CASES, ids=str)
def test_twenty_steps_are_fsdp2s(ranks: Pools, run: Run, settings: dict[str, Any]) -> None:
    theirs = by_fsdp2(ranks, run)
    ours = ranks.run(run.world_size, trained, run, "pipeline", PipelineSettings(**settings))
    np.testing.assert_allclose(mean_losses(ours), mean_losses(theirs), rtol=0, atol=1e-9)
    assert ours[0].params.keys() == theirs[0].params.keys()
    for name, values in theirs[0].params.items():
        np.testing.assert_allclose(ours[0].params[name], values, rtol=0, atol=1e-9, err_msg=name)
    for result in ours:
        assert result.held_out == pytest.approx(theirs[0].held_out, abs=1e-9)
    groups = run.nodes // settings.get("nodes_per_stage", 1)
    tokens = (groups - 1) * run.accumulation * 2 * (SEQUENCE_LENGTH + 1) * 4
    for rank in ours:
        handed = rank.sent["forward"] + rank.sent["backward"]
        gathered = rank.inside.get("forward", 0) + rank.inside.get("backward", 0)
        assert handed == run.ranks_per_node * (rank.given + tokens + gathered)
    # Each node sends what its ranks send; the closed form is the busiest node's.
    per_node = [
        sum(sum(rank.sent.values()) for rank in ours[start : start + run.ranks_per_node])
        for start in range(0, run.world_size, run.ranks_per_node)
    ]
    assert max(per_node) == pytest.approx(run.ranks_per_node * ours[0].closed_form)


def test_bfloat16_trains_as_near_as_its_rounding(ranks: Pools) -> None:
    run = Run(2, 2, 2, "llama", "lora", steps=5, dtype=torch.bfloat16, params=torch.float32)
    theirs = ranks.run(4, trained, run, "fsdp2", Settings())
    ours = ranks.run(4, trained, run, "pipeline", PipelineSettings())
    np.testing.assert_allclose(mean_losses(ours), mean_losses(theirs), rtol=5e-3)


@pytest.mark.parametrize(
    "settings",
    [PipelineSettings(**GROUPS), PipelineSettings(pipeline_schedule="looped", **TWO)],
    ids=["groups", "looped"],
)
def test_no_rank_keeps_weights_of_other_stages(ranks: Pools, settings: PipelineSettings) -> None:
    assert ranks.run(4, kept, Run(4, 1, 1, "gpt2", "full", layers=8), settings) == [0] * 4


@pytest.mark.parametrize("schedule", ["ahead", "1f1b"])
def test_what_crosses_inside_a_group_holds_up_no_message_of_the_pipeline(
    ranks: Pools, schedule: PipelineSchedule
) -> None:
    """A later stage gathers before anything arrives; sums cross when all has been handed back."""
    settings = PipelineSettings(**GROUPS, pipeline_schedule=schedule)
    stages = ranks.run(4, sent, Run(4, 1, 2, "gpt2", "full"), settings)
    assert stages == [(0, 0), (0, 0), (1, 0), (1, 0)]

"""A pipeline trains as FSDP2 does, by every schedule, and sends what its closed form says."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from baselines.pipeline import schedules
from baselines.settings import PipelineSettings, Settings
from tests.baselines.pipeline.training import Result, Run, trained
from tests.baselines.training import SEQUENCE_LENGTH
from tests.ranks import Pools
from tests.tiers import in_ci

TWO = {"stages_per_node": 2}
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
    in_ci(LLAMA, {"pipeline_schedule": "ahead"}),
    in_ci(LLAMA, {"pipeline_schedule": "1f1b"}),
    in_ci(LLAMA, {"pipeline_schedule": "zb", **TWO}),
    in_ci(HALF, {"pipeline_schedule": "gpipe"}),
    in_ci(HALF, {"pipeline_schedule": "looped", **TWO}),
    in_ci(THREE, {"pipeline_schedule": "1f1b"}),
    (THREE, {"pipeline_schedule": "ahead"}),
    in_ci(LORA, {"pipeline_schedule": "gpipe"}),
    (LORA, {"pipeline_schedule": "interleaved", **TWO}),
    in_ci(FOUR, {"pipeline_schedule": "ahead"}),
    in_ci(FOUR, {"pipeline_schedule": "zb", **TWO}),
    in_ci(LAST_HALF, {"pipeline_schedule": "looped", **TWO}),
    in_ci(LAST_HALF, {"pipeline_schedule": "gpipe"}),
    in_ci(LAST_HALF, {"pipeline_schedule": "zb", **TWO}),
    in_ci(HEAD, {"pipeline_schedule": "ahead"}),
    (HEAD, {"pipeline_schedule": "zb"}),
    in_ci(Run(1, 2, 1, "gpt2", "full"), {}),
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
    tokens = (run.nodes - 1) * run.accumulation * 2 * (SEQUENCE_LENGTH + 1) * 4
    for rank in ours:
        handed = rank.sent["forward"] + rank.sent["backward"]
        assert handed == run.ranks_per_node * (rank.given + tokens)
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
    ("name", "micro_batches", "share"),
    [("gpipe", 2, 1 / 3), ("ahead", 8, 1 / 9), ("zb", 2, 1 / 7)],
)
def test_bubbles_shrink_with_micro_batches(name: Any, micro_batches: int, share: float) -> None:
    assert schedules.bubble(name, 2, 1, micro_batches) == pytest.approx(share)
    assert schedules.bubble(name, 1, 1, micro_batches) == 0

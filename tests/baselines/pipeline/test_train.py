"""A pipeline trains as FSDP2 does, by every schedule, and sends what its closed form says."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from baselines.settings import PipelineSettings, Settings
from tests.baselines.pipeline.training import Result, Run, trained
from tests.ranks import Pools

CASES = [
    (Run(2, 2, 1, "gpt2", "full"), {"pipeline_schedule": "ahead"}),
    (Run(2, 2, 1, "gpt2", "full"), {"pipeline_schedule": "interleaved", "stages_per_node": 2}),
    (Run(2, 2, 1, "gpt2", "full"), {"within_stage": "replicated"}),
    (Run(2, 2, 4, "llama", "lora"), {"pipeline_schedule": "ahead"}),
    (Run(2, 2, 4, "llama", "lora"), {"pipeline_schedule": "1f1b"}),
    (Run(2, 2, 4, "llama", "lora"), {"pipeline_schedule": "zb", "stages_per_node": 2}),
    (Run(2, 2, 8, "gpt2", "half"), {"pipeline_schedule": "gpipe"}),
    (Run(2, 2, 8, "gpt2", "half"), {"pipeline_schedule": "looped", "stages_per_node": 2}),
    (Run(3, 1, 1, "gpt2", "full", layers=6), {"pipeline_schedule": "1f1b"}),
    (Run(3, 1, 1, "gpt2", "full", layers=6), {"pipeline_schedule": "ahead"}),
    (Run(3, 1, 3, "gpt2", "lora", layers=6), {"pipeline_schedule": "gpipe"}),
    (
        Run(3, 1, 3, "gpt2", "lora", layers=6),
        {"pipeline_schedule": "interleaved", "stages_per_node": 2},
    ),
    (Run(4, 1, 2, "llama", "full", layers=8), {"pipeline_schedule": "ahead"}),
    (Run(4, 1, 2, "llama", "full", layers=8), {"pipeline_schedule": "zb", "stages_per_node": 2}),
    (Run(4, 1, 2, "gpt2", "half", layers=8), {"pipeline_schedule": "looped", "stages_per_node": 2}),
    (Run(4, 1, 2, "gpt2", "half", layers=8), {"pipeline_schedule": "gpipe"}),
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
    # Each node sends what its ranks send; the closed form is the busiest node's.
    per_node = [
        sum(sum(rank.sent.values()) for rank in ours[start : start + run.ranks_per_node])
        for start in range(0, run.world_size, run.ranks_per_node)
    ]
    assert max(per_node) == pytest.approx(run.ranks_per_node * ours[0].closed_form)

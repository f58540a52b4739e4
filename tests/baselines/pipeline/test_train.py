"""A pipeline trains as FSDP2 does, by every schedule, and sends what its closed form says."""

import functools
import gc
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import fcdp
from baselines.pipeline import cached, train
from baselines.pipeline.cached import CachedStage
from baselines.settings import PipelineSchedule, PipelineSettings, Settings
from fcdp import fsdp2
from fcdp.engine import engine_of
from tests.baselines.pipeline.training import Result, begun, inside_of, trained
from tests.baselines.training import SEQUENCE_LENGTH, Run, noting, runs, step
from tests.ranks import Pools, on_ranks

TWO = {"stages_per_node": 2}
GROUPS = {"within_stage": "fcdp", "nodes_per_stage": 2}
CASES = runs(__file__)


def mean_losses(results: Sequence[Result]) -> np.ndarray:
    return np.mean([result.losses for result in results], axis=0)


@functools.cache
def by_fsdp2(ranks: Pools, run: Run) -> list[Result]:
    return ranks.run(run.world_size, trained, run, "fsdp2", Settings())


@pytest.mark.parametrize(("run", "settings"), CASES, ids=str)
def test_training_is_fsdp2s(ranks: Pools, run: Run, settings: dict[str, Any]) -> None:
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


@pytest.mark.system
def test_bfloat16_trains_as_near_as_its_rounding(ranks: Pools) -> None:
    run = Run(2, 2, 2, "llama", "lora", steps=5, dtype=torch.bfloat16)
    theirs = ranks.run(4, trained, run, "fsdp2", Settings())
    ours = ranks.run(4, trained, run, "pipeline", PipelineSettings())
    np.testing.assert_allclose(mean_losses(ours), mean_losses(theirs), rtol=5e-3)


@pytest.mark.parametrize(("nodes", "schedule"), [(1, "ahead"), (1, "zb"), (2, "ahead")])
@on_ranks(4)
def test_fcdp_holds_little_of_a_stage_at_once(nodes: int, schedule: PipelineSchedule) -> None:
    own: dict[str, Any] = {"nodes_per_stage": nodes, "pipeline_schedule": schedule}
    run = Run(2, 2, 4, "gpt2", "full", layers=12)
    trainable, batches = begun(run, PipelineSettings(within_stage="fcdp", **own))
    groups = [unit.group for stage in trainable.stages for unit in engine_of(stage).units]
    sizes = {group: sum(param.nbytes for param in fsdp2.sharded_params(group)) for group in groups}
    gathered, gradients, sums = [0], [0], [0]

    def look(*_: Any, **__: Any) -> None:
        gathered.append(sum(sizes[group] for group in groups if group.is_unsharded))

    def look_at_gradients(*_: Any, **__: Any) -> None:
        look()
        having = [param for group in groups for param in fsdp2.with_gradients(group)]
        gradients.append(sum(param.sharded_param.nbytes for param in having))
        if nodes > 1:
            sums.append(sum(fcdp.ledger(stage).pending_bytes for stage in trainable.stages))
            return
        params = [param for group in groups for param in fsdp2.sharded_params(group)]
        shards = [param.grad.to_local() for param in params if param.grad is not None]
        sums.append(sum(shard.nbytes for shard in shards))

    for stage in trainable.stages:
        for part in chain.from_iterable(block.children() for block in stage.blocks):
            part.register_forward_hook(look)
            part.register_full_backward_pre_hook(look)
    with (
        noting(cached, "stage_backward_weight", look_at_gradients),
        noting(CachedStage, "get_bwd_send_ops", look_at_gradients),
        noting(CachedStage, "perform_reduce_grad", look_at_gradients),
    ):
        step(trainable, batches)
    parameters = sum(sizes.values())
    # The root and the block; what is gathered ahead of its use is not there yet.
    assert 0 < max(gathered) <= 2 * max(sizes.values()) < parameters / 2
    assert max(gradients) == 0
    assert max(sums) == pytest.approx(parameters / run.ranks_per_node, rel=0.01)


@pytest.mark.parametrize(
    "settings",
    [PipelineSettings(**GROUPS), PipelineSettings(pipeline_schedule="looped", **TWO)],
    ids=["groups", "looped"],
)
@on_ranks(4)
def test_no_rank_keeps_weights_of_other_stages(settings: PipelineSettings) -> None:
    whole: list[weakref.ref[Any]] = []

    def look(model: torch.nn.Module, *_: Any) -> None:
        whole.extend(map(weakref.ref, model.parameters()))

    with noting(train, "look", look):
        trainable, _ = Run(4, 1, 1, "gpt2", "full", layers=8).made("pipeline", settings)
    gc.collect()
    assert whole
    assert trainable  # holds what it needs
    assert not any(param() is not None for param in whole)


@pytest.mark.parametrize("schedule", ["ahead", "1f1b"])
@on_ranks(4)
def test_what_crosses_inside_a_group_holds_up_no_message_of_the_pipeline(
    schedule: PipelineSchedule,
) -> None:
    """A later stage gathers before anything arrives; sums cross when all has been handed back."""
    run = Run(4, 1, 2, "gpt2", "full")
    trainable, batches = begun(run, PipelineSettings(**GROUPS, pipeline_schedule=schedule))
    (stage,) = trainable.stages
    # Also in the first step, in which PyTorch looks at shapes.
    assert fcdp.ledger(stage).misses == len(engine_of(stage).units)
    trainable.take_ledger()
    gathered, reduced = list[int](), [0]

    def forward(*_: Any, **__: Any) -> None:
        gathered.append(inside_of(trainable).get("forward", 0))

    def hand_back(*_: Any, **__: Any) -> None:
        reduced.append(inside_of(trainable).get("reduce", 0))

    with (
        noting(CachedStage, "forward_one_chunk", forward),
        noting(CachedStage, "get_bwd_send_ops", hand_back),
    ):
        step(trainable, batches)
    inside = inside_of(trainable)
    assert gathered[0] == (0 if stage.is_first else inside["forward"])
    assert reduced[-1] == 0 < inside["reduce"] == inside["forward"]

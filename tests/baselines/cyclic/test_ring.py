"""Forms of a cycle train as the synchronous reference does; ranks send messages alone."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from baselines.optimizers import AnyOptimizer
from baselines.settings import CyclicSettings, UpdateRule
from baselines.strategy import load
from tests.baselines.cyclic.training import ADAMW, PLAIN, Trace, alike, batch, made, trained
from tests.ranks import Pools, RankFailure, RankPool, on_ranks

STEPS = 5
FORMS = ("cyclic-ring", "cyclic-zero")


def _traces(by_rank: list[list[Trace]]) -> list[Trace]:
    return [trace for traces in by_rank for trace in traces]


def _same(actual: list[Trace], expected: list[Trace]) -> None:
    assert actual[0].held_out == pytest.approx(expected[0].held_out, rel=1e-5)
    for number, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        for step in range(STEPS):
            alike(mine.used[step], other.used[step], f"micro-batch {number}, step {step}:")


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize(
    ("count", "stages", "optimizer"),
    [(1, 1, ADAMW), (3, 3, PLAIN), (3, 2, ADAMW), (2, 1, PLAIN)],
    ids=["alone", "all stages", "fewer stages", "one stage"],
)
def test_each_micro_batch_computes_with_what_it_would_in_synchrony(
    ranks: Pools, rule: UpdateRule, count: int, stages: int, optimizer: AnyOptimizer
) -> None:
    """On a rank each, or in turn on one; evaluations in between change nothing.

    Three have frozen parameters.
    """
    settings = CyclicSettings(rule=rule, stages=None if stages == count else stages)
    arguments = settings, STEPS, count == 3, (0, 1, 3), optimizer
    expected = _traces(ranks.run(count, trained, "cyclic", count, *arguments))
    for form in FORMS:
        actual = _traces(ranks.run(count, trained, form, count, *arguments))
        _same(actual, expected)
        for mine, other in zip(actual, expected, strict=True):
            assert mine.losses == pytest.approx(other.losses, rel=1e-5)
    in_turn = ranks.run(1, trained, "cyclic-interleaved", 1, *arguments, count)
    _same(_traces(in_turn), expected)


def test_in_bfloat16_it_learns_as_in_synchrony(ranks: Pools) -> None:
    arguments = CyclicSettings(), STEPS, False, (), ADAMW
    expected = _traces(ranks.run(3, trained, "cyclic", 3, *arguments, 1, torch.bfloat16))
    for form in FORMS:
        actual = _traces(ranks.run(3, trained, form, 3, *arguments, 1, torch.bfloat16))
        for mine, other in zip(actual, expected, strict=True):
            assert mine.losses == pytest.approx(other.losses, rel=0.01)
            assert mine.held_out == pytest.approx(other.held_out, rel=0.01)
    ((first, *_),) = ranks.run(1, trained, "cyclic-interleaved", 1, *arguments, 3, torch.bfloat16)
    assert first.held_out == pytest.approx(expected[0].held_out, rel=0.01)


@pytest.mark.parametrize(("form", "stages_at_once"), [("cyclic-ring", 1), ("cyclic-zero", 2)])
@pytest.mark.parametrize("rule", ["v1", "v2"])
@on_ranks(4)
def test_a_slot_sends_one_stage(form: str, stages_at_once: int, rule: UpdateRule) -> None:
    """In backward ``zero`` sends the blocks' parameters on beside the gradients."""
    model, job = made(4, 1, CyclicSettings(rule=rule))
    trainable = load(form)(model, job)
    for step in range(3):
        trainable.step([batch(job.topology.rank, step)])
    metrics: Any = trainable.take_metrics()
    by_slot = metrics["bytes_by_slot"]
    largest = max(sum(p.numel() for p in stage.params) * 4 for stage in trainable._stages)
    assert trainable.take_metrics() == {}
    assert len(by_slot) == 8
    assert min(by_slot) > 0, by_slot
    assert max(by_slot[:4]) == largest, by_slot
    assert max(by_slot[4:]) == stages_at_once * largest, by_slot


@on_ranks(4)
def test_zero_has_parameters_of_blocks_where_they_are_computed_with() -> None:
    model, job = made(4, 1, CyclicSettings())
    params = [param for block in job.blocks for param in block.parameters()]
    total = sum(param.nbytes for param in params)
    trainable = load("cyclic-zero")(model, job)
    dist.barrier()  # ranks may wait for one another before the first step

    def there() -> int:
        return sum(p.nbytes for p in params if p.untyped_storage().nbytes())

    held: list[int] = []
    for block in job.blocks:
        block.register_forward_pre_hook(lambda *_: held.append(there()))
    for param in params:
        param.register_hook(lambda _: held.append(there()))
    for step in range(3):
        trainable.step([batch(job.topology.rank, step)])
    trainable.settle()
    largest, owned = max(held), there()
    # Five blocks in four stages: its own, and those of one other.
    assert 0 < owned < largest < total
    assert largest - owned <= total * 2 / 5


@on_ranks(2)
def test_what_is_no_cycle_is_refused() -> None:
    micro_batches = "stages = 3: allowed are 1 to 2, as there are 2 micro-batches per step"
    with pytest.raises(ValueError, match=micro_batches):
        load("cyclic-interleaved")(*made(2, 1, CyclicSettings(stages=3), k=2))
    for form in FORMS:
        with pytest.raises(ValueError, match="stages = 3: allowed are 1 to 2, as there are 2 rank"):
            load(form)(*made(2, 1, CyclicSettings(stages=3)))
        with pytest.raises(ValueError, match="accumulation = 2: allowed is 1"):
            load(form)(*made(2, 1, CyclicSettings(), k=2))


def test_a_dead_rank_ends_the_others_with_its_name() -> None:
    pool = RankPool(3)
    try:
        begin = time.monotonic()
        with pytest.raises(RankFailure, match=r"rank 1: it has ended, or hangs") as failure:
            pool.run(_ended)
        assert time.monotonic() - begin < 60
        assert "its process has ended" in str(failure.value)
    finally:
        pool.close()


def _ended() -> None:
    model, job = made(3, 1, CyclicSettings())
    trainable = load("cyclic-ring")(model, job)
    for step in range(20):
        if step == 3 and job.topology.rank == 1:
            os._exit(1)
        trainable.step([batch(job.topology.rank, step)])

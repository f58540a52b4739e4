"""The executor trains as the synchronous reference does, by messages from rank to rank alone."""

import os
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from baselines.optimizers import AnyOptimizer
from baselines.settings import CyclicSettings, UpdateRule
from baselines.strategy import load
from tests.baselines.cyclic.training import ADAMW, PLAIN, Trace, alike, batch, made, trained
from tests.ranks import Pools, RankFailure, RankPool, on_ranks

pytestmark = pytest.mark.ranks

STEPS = 5
FORMS = ("cyclic-ring", "cyclic-zero")


def _same(actual: list[Trace], expected: list[Trace]) -> None:
    for rank, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert mine.losses == pytest.approx(other.losses, rel=1e-5)
        assert mine.held_out == pytest.approx(other.held_out, rel=1e-5)
        for step in range(STEPS):
            alike(mine.used[step], other.used[step], f"rank {rank}, step {step}:")


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize(("count", "stages"), [(1, 1), (3, 3), (3, 2)])
@pytest.mark.parametrize("optimizer", [ADAMW, PLAIN], ids=["adamw", "sgd"])
def test_each_rank_computes_with_what_it_would_in_synchrony(
    ranks: Pools, rule: UpdateRule, count: int, stages: int, optimizer: AnyOptimizer
) -> None:
    """Evaluations in between change nothing; three ranks have frozen parameters."""
    settings = CyclicSettings(rule=rule, stages=None if stages == count else stages)
    arguments = (count, settings, STEPS, count == 3, (0, 1, 3), 1, optimizer)
    expected = ranks.run(count, trained, "cyclic", *arguments)
    for form in FORMS:
        _same(ranks.run(count, trained, form, *arguments), expected)


def test_in_bfloat16_it_learns_as_in_synchrony(ranks: Pools) -> None:
    expected = ranks.run(3, _in_bfloat16, "cyclic", 3, 1)
    for form in FORMS:
        assert ranks.run(3, _in_bfloat16, form, 3, 1) == [
            pytest.approx(losses, rel=0.01) for losses in expected
        ]
    (alone,) = ranks.run(1, _in_bfloat16, "cyclic-interleaved", 1, 3)
    assert alone[-1] == pytest.approx(expected[0][-1], rel=0.01)


def _in_bfloat16(form: str, ranks: int, k: int) -> list[float]:
    """This rank's losses, and that of the mean parameters after the last step."""
    model, job = made(ranks, 1, CyclicSettings(), k=k)
    trainable = load(form)(model, replace(job, dtype=torch.bfloat16))
    losses = []
    for step in range(STEPS):
        sequences = [batch(job.topology.rank + number, step) for number in range(k)]
        losses.append(trainable.step(sequences).item())
    return [*losses, trainable.evaluate(batch(99, 0)).item()]


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


@pytest.mark.parametrize("form", FORMS)
def test_what_crosses_nodes_is_the_closed_form(ranks: Pools, form: str) -> None:
    by_rank = ranks.run(4, _crossing, form)
    expected = {closed_form for closed_form, _ in by_rank}
    nodes = [sum(sent for _, sent in by_rank[2 * node : 2 * node + 2]) for node in range(2)]
    assert expected == {max(nodes)}


def _crossing(form: str) -> tuple[float, float]:
    """The closed form, and what this rank sends to the other node in a step without collectives."""
    model, job = made(2, 2, CyclicSettings())
    trainable = load(form)(model, job)
    trainable.step([batch(job.topology.rank, 0)])
    trainable.settle()
    sent: list[int] = []
    original = dist.isend

    def counted(tensor: torch.Tensor, *, group_dst: int, **rest: Any) -> Any:
        sent.append(tensor.nbytes * (group_dst // 2 != job.topology.node))
        return original(tensor, group_dst=group_dst, **rest)

    names = ("all_reduce", "broadcast", "all_gather", "reduce", "barrier", "all_gather_into_tensor")
    refused = mock.Mock(side_effect=AssertionError("a collective in a step"))
    with mock.patch.multiple(dist, isend=counted, **dict.fromkeys(names, refused)):
        trainable.step([batch(job.topology.rank, 1)])
        trainable.settle()
    return trainable.closed_form_bytes, sum(sent)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(4)
def test_parameters_of_blocks_lie_where_they_are_computed_with(form: str) -> None:
    model, job = made(4, 1, CyclicSettings())
    params = [param for block in job.blocks for param in block.parameters()]
    total = sum(param.nbytes for param in params)
    trainable = load(form)(model, job)
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
    if form == "cyclic-ring":
        assert largest == total
    else:
        # Five blocks in four stages: its own, and those of one other.
        assert 0 < owned < largest < total
        assert largest - owned <= total * 2 / 5


@on_ranks(2)
def test_what_is_no_cycle_is_refused() -> None:
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

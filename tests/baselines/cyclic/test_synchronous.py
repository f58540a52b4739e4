"""Cyclic Data Parallelism trains as its update rules say, computed here in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from baselines import optimizers
from baselines.cyclic.rule import Rule, is_fresh, partition
from baselines.cyclic.synchronous import Cyclic, build
from baselines.settings import CyclicSettings
from baselines.strategy import Job, load
from tests.baselines.co2.workers import LEARNING_RATE, batches, flat, loss
from tests.fcdp.training import topology_of
from tests.ranks import Pools

pytestmark = pytest.mark.ranks

STEPS, WIDTH, BLOCKS = 5, 6, 3


def model() -> nn.Sequential:
    """Return three blocks, the same on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    )


ADAMW = optimizers.AdamW()
#: Learning rates of their own in each step.
SCHEDULES: list[optimizers.AnyOptimizer] = [
    optimizers.AdamW(inverse_sqrt_after=3),
    optimizers.AdamW(cosine=optimizers.Cosine(warm_up=2, end=STEPS)),
    optimizers.SGD(kind="sgd", decay=optimizers.Decay(every=1, by=0.5)),
]


def job(
    ranks: int,
    settings: CyclicSettings,
    accumulation: int = 1,
    optimizer: optimizers.AnyOptimizer = ADAMW,
) -> tuple[nn.Module, Job]:
    trained = model()
    return trained, Job(
        topology=topology_of(ranks, 1),
        blocks=[*trained.children()],
        dtype=torch.float32,
        learning_rate=LEARNING_RATE,
        micro_batch=2,
        accumulation=accumulation,
        settings=settings,
        optimizer=optimizer,
        loss=loss,
    )


def made(ranks: int, settings: CyclicSettings) -> Cyclic:
    return build(*job(ranks, settings))


def trained(
    ranks: int,
    settings: CyclicSettings,
    accumulation: int,
    optimizer: optimizers.AnyOptimizer = ADAMW,
) -> list[torch.Tensor]:
    """This rank's parameters before each step, and after the last."""
    cyclic = build(*job(ranks, settings, accumulation, optimizer))
    own = batches(cyclic.job.topology.rank)
    found = [flat(cyclic.model)]
    for _ in range(STEPS):
        cyclic.step([next(own) for _ in range(accumulation)])
        found.append(flat(cyclic.model))
    return found


def by_the_rule(
    rule: Rule,
    ranks: int,
    stages: int,
    accumulation: int,
    chosen: optimizers.AnyOptimizer = ADAMW,
) -> list[list[torch.Tensor]]:
    """What each rank computes with: θ_t where a stage is fresh, else θ_{t−1}."""
    newest = model()
    optimizer = optimizers.make(chosen, newest.parameters(), LEARNING_RATE)
    runs = partition([1] * BLOCKS, stages)
    data = [batches(rank) for rank in range(ranks)]
    before = [param.detach().clone() for param in newest.parameters()]
    found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for step in range(STEPS + 1):
        now = [param.detach().clone() for param in newest.parameters()]
        sums = [torch.zeros_like(param) for param in now]
        for rank in range(ranks):
            used = model()
            with torch.no_grad():
                for stage, run in enumerate(runs):
                    versions = now if is_fresh(rule, rank, stage, stages) else before
                    for index in run:
                        for place, param in enumerate(used[index].parameters()):
                            param.copy_(versions[2 * index + place])
            found[rank].append(flat(used))
            if step == STEPS:
                continue
            for _ in range(accumulation):
                (loss(used, next(data[rank])) / (ranks * accumulation)).backward()
            for total, param in zip(sums, used.parameters(), strict=True):
                assert param.grad is not None
                total += param.grad
        for param, total in zip(newest.parameters(), sums, strict=True):
            param.grad = total
        optimizer.step()
        before = now
    return found


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize(
    ("ranks_", "stages", "accumulation"), [(1, 1, 1), (2, 2, 2), (3, 3, 1), (3, 2, 1)]
)
def test_every_rank_computes_with_what_the_rule_says(
    ranks: Pools, rule: Rule, ranks_: int, stages: int, accumulation: int
) -> None:
    settings = CyclicSettings(rule=rule, stages=None if stages == ranks_ else stages)
    found = ranks.run(ranks_, trained, ranks_, settings, accumulation)
    alike(found, by_the_rule(rule, ranks_, stages, accumulation))


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize("optimizer", SCHEDULES, ids=["root", "cosine", "decay"])
def test_a_late_step_has_the_learning_rate_of_the_step_that_it_is(
    ranks: Pools, rule: Rule, optimizer: optimizers.AnyOptimizer
) -> None:
    found = ranks.run(2, trained, 2, CyclicSettings(rule=rule), 1, optimizer)
    alike(found, by_the_rule(rule, 2, 2, 1, optimizer))


def alike(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    """Compare what each rank computed with, step by step."""
    for mine, other in zip(found, expected, strict=True):
        for step, (actual, wanted) in enumerate(zip(mine, other, strict=True)):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6, msg=f"step {step}")


def test_losses_are_those_of_the_mean_parameters_and_training_goes_on(ranks: Pools) -> None:
    for alike, unharmed, apart in ranks.run(2, _evaluated):
        assert alike
        assert unharmed
        assert apart


def _evaluated() -> tuple[bool, bool, bool]:
    cyclic = made(2, CyclicSettings())
    own = batches(cyclic.job.topology.rank)
    for _ in range(3):
        cyclic.step([next(own)])
    before = flat(cyclic.model)
    held_out = next(batches(9))
    told = cyclic.evaluate(held_out)
    every = [torch.empty_like(before) for _ in range(2)]
    torch.distributed.all_gather(every, before)
    mean = model()
    nn.utils.vector_to_parameters((every[0] + every[1]) / 2, mean.parameters())
    same = torch.allclose(told, loss(mean, held_out), rtol=1e-5)
    return same, flat(cyclic.model).equal(before), not every[0].equal(every[1])


def test_more_stages_than_ranks_or_blocks_are_refused(ranks: Pools) -> None:
    ranks.run(2, _refused)


def _refused() -> None:
    with pytest.raises(ValueError, match="stages = 3: allowed are 1 to 2, as there are 2 ranks"):
        load("cyclic")(*job(2, CyclicSettings(stages=3)))

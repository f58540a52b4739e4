"""Cyclic Data Parallelism trains as its update rules say, computed here in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from baselines import optimizers
from baselines.cyclic.routes import is_fresh, partition
from baselines.cyclic.stages import parameters
from baselines.cyclic.synchronous import Cyclic
from baselines.settings import CyclicSettings, UpdateRule
from tests.baselines.cyclic.training import ADAMW, BLOCKS, Tied, alike, batch, loss, made, trained
from tests.baselines.jobs import LEARNING_RATE
from tests.ranks import Pools, on_ranks

STEPS = 5
#: Learning rates of their own in each step.
ROOT = optimizers.AdamW(inverse_sqrt_after=3)
COSINE = optimizers.AdamW(cosine=optimizers.Cosine(warm_up=2, end=STEPS))
DECAY = optimizers.SGD(kind="sgd", decay=optimizers.Decay(every=1, by=0.5))


def by_the_rule(
    rule: UpdateRule, ranks: int, stages: int, k: int, chosen: optimizers.AnyOptimizer
) -> list[list[dict[str, torch.Tensor]]]:
    """Each rank's parameters in each step: θ_t where a stage is fresh, else θ_{t−1}."""
    torch.manual_seed(1)
    newest = Tied()
    named = dict(newest.named_parameters())
    of_stages = parameters(newest, [*newest.blocks], partition([1] * BLOCKS, stages))
    stage = {id(param): index for index, params in enumerate(of_stages) for param in params}
    optimizer = optimizers.make(chosen, newest.parameters(), LEARNING_RATE)
    before = {name: param.detach().clone() for name, param in named.items()}
    by_rank: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        now = {name: param.detach().clone() for name, param in named.items()}
        optimizer.zero_grad()
        for rank in range(ranks):
            versions = {
                name: now if is_fresh(rule, rank, stage[id(param)], stages) else before
                for name, param in named.items()
            }
            used = Tied()
            used.load_state_dict({name: of[name] for name, of in versions.items()}, strict=False)
            by_rank[rank].append({name: of[name] for name, of in versions.items()})
            for number in range(k * rank, k * (rank + 1)):
                (loss(used, batch(number, step)) / (ranks * k)).backward()
            for name, param in used.named_parameters():
                assert param.grad is not None
                total = named[name].grad
                named[name].grad = param.grad if total is None else total + param.grad
        optimizer.step()
        before = now
    return by_rank


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize(
    ("count", "stages", "k", "optimizer"),
    [(1, 1, 1, ADAMW), (2, 2, 2, ROOT), (2, 2, 1, COSINE), (3, 2, 1, DECAY)],
    ids=["alone", "root", "cosine", "decay"],
)
def test_every_rank_computes_with_what_the_rule_says(
    ranks: Pools,
    rule: UpdateRule,
    count: int,
    stages: int,
    k: int,
    optimizer: optimizers.AnyOptimizer,
) -> None:
    """A late step has the learning rate of the step that it is."""
    settings = CyclicSettings(rule=rule, stages=None if stages == count else stages)
    actual = ranks.run(count, trained, "cyclic", count, settings, STEPS, False, (), optimizer, k)
    expected = by_the_rule(rule, count, stages, k, optimizer)
    for rank, ((mine,), other) in enumerate(zip(actual, expected, strict=True)):
        for step in range(STEPS):
            # The head is the embedding's matrix.
            used = dict(mine.used[step])
            used["embedding.weight"] = used.pop("head.weight")
            alike(used, other[step], f"rank {rank}, step {step}:")


@on_ranks(2)
def test_losses_are_those_of_the_mean_parameters_and_training_goes_on() -> None:
    model, job = made(2, 1, CyclicSettings())
    cyclic = Cyclic(model, job)
    for step in range(3):
        cyclic.step([batch(job.topology.rank, step)])
    before = parameters_to_vector(model.parameters()).detach()
    measured = cyclic.evaluate(batch(99, 0))
    gathered = [torch.empty_like(before) for _ in range(2)]
    dist.all_gather(gathered, before)
    mean = Tied()
    vector_to_parameters((gathered[0] + gathered[1]) / 2, mean.parameters())
    torch.testing.assert_close(measured, loss(mean, batch(99, 0)), rtol=1e-5, atol=0.0)
    assert parameters_to_vector(model.parameters()).equal(before)
    assert not gathered[0].equal(gathered[1])

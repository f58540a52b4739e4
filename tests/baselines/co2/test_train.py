"""Local SGD, SlowMo and CO2 as the listing has them, on ranks that exchange for real."""

from typing import Any

import pytest
import torch

from baselines.settings import CO2Settings, LocalSGDSettings, SlowMoSettings
from tests.baselines.co2.workers import ALL, Training, batches, listing, made, starts
from tests.ranks import Pools, on_ranks

pytestmark = pytest.mark.ranks

#: Workers of two nodes that FCDP shards.
PAIRS: dict[str, Any] = {"worker": "nodes", "nodes_per_worker": 2}
OVER_FCDP = ALL.model_copy(update=PAIRS)


@pytest.mark.parametrize(
    "training",
    [
        Training(ALL, nodes=2),
        Training(ALL.model_copy(update={"penalty": "first-steps"}), nodes=2, accumulation=2),
        Training(CO2Settings(interval=2, by_learning_rate=True, clip=1.0), nodes=2),
        Training(LocalSGDSettings(interval=3), nodes=2),
        Training(SlowMoSettings(interval=3), nodes=2),
        Training(ALL, nodes=2, ranks_per_node=2),
        Training(ALL.model_copy(update={"worker": "node"}), nodes=2, ranks_per_node=2),
        Training(ALL.model_copy(update={"worker": "nodes"}), nodes=2, ranks_per_node=2),
        Training(OVER_FCDP, nodes=4, accumulation=2),
        Training(SlowMoSettings(interval=3, **PAIRS), nodes=4),
    ],
    ids=[
        *("co2", "in rounds", "by rate", "local sgd", "slowmo", "four ranks", "sharded workers"),
        *("fcdp in a node", "fcdp over nodes", "slowmo over fcdp"),
    ],
)
def test_all_ranks_start_alike_and_as_the_listing_says(ranks: Pools, training: Training) -> None:
    world = training.nodes * training.ranks_per_node
    by_rank = ranks.run(world, starts, training)
    for others in by_rank[1:]:
        assert all(mine.equal(first) for mine, first in zip(others, by_rank[0], strict=True))
    for mine, expected in zip(by_rank[0], listing(training), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(4)
def test_over_fcdp_a_step_sends_what_fcdp_does_and_a_share_of_the_exchange(
    accumulation: int,
) -> None:
    _, workers = made(Training(OVER_FCDP, nodes=4, accumulation=accumulation))
    data = batches(workers.job.topology.rank)
    for step in range(4):
        if step == 1:
            workers.take_ledger()
        workers.step([next(data) for _ in range(accumulation)])
    workers.settle()
    cache, ledger = workers.cache, workers.take_ledger()
    # 78 parameters in two units, which cross the two nodes of a worker once as parameters and once
    # as gradients; and the displacement, of which a node has half, crosses once in three steps.
    inside, between = 2 * (1 / 2) * 78 * 4, 2 * (1 / 2) * 78 / 2 * 4
    assert workers.closed_form_bytes == pytest.approx(inside + between / 3)
    assert sum(ledger["inter_node"].values()) == pytest.approx(3 * inside, rel=0.1)
    assert (workers.policy, cache.hits > 0) == ("host", True)


@on_ranks(2)
def test_metrics_are_of_the_updates_since_they_were_taken() -> None:
    _, workers = made(Training(ALL, nodes=2))
    data = batches(workers.job.topology.rank)
    for _ in range(3):
        workers.step([next(data)])
    assert workers.take_metrics() == {}
    for _ in range(9):
        workers.step([next(data)])
    metrics = workers.take_metrics()
    assert metrics["staleness_gap"] > 1
    assert 0 < metrics["worker_drift"] <= 1
    assert 0 < metrics["clipped_fraction"] < 1
    assert workers.take_metrics() == {}
    workers.settle()

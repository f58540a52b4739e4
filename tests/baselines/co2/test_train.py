"""Local SGD, SlowMo and CO2 as the listing has them, on ranks that exchange for real."""

from typing import Any

import pytest
import torch

from baselines.co2.train import Rule
from baselines.settings import CO2Settings, LocalSGDSettings, SlowMoSettings
from tests.baselines.co2.workers import ALL, ON_HOST, Training, batches, listing, made, starts
from tests.ranks import Pools, on_ranks

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
        Training(ON_HOST, nodes=2, ranks_per_node=2),
        Training(ALL.model_copy(update={"worker": "node"}), nodes=2, ranks_per_node=2),
        Training(ON_HOST.model_copy(update={"worker": "nodes"}), nodes=2, ranks_per_node=2),
        Training(OVER_FCDP, nodes=4, accumulation=2),
        Training(SlowMoSettings(interval=3, **PAIRS), nodes=4),
    ],
    ids=[
        *("co2", "in rounds", "by rate", "local sgd", "slowmo", "on the host", "sharded workers"),
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


def test_where_a_round_has_taken_no_step_its_displacement_is_not_divided() -> None:
    rule, moved = Rule(4, penalty="first-step"), torch.tensor(6.0)
    assert [rule.staleness(moved, torch.tensor(first)) for first in (0.5, 0.0)] == [13, 1]

"""Local SGD, SlowMo and CO2 as the listing has them, on ranks that exchange for real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from baselines.settings import CO2Settings, LocalSGDSettings, SlowMoSettings
from tests.baselines.co2.workers import (
    ALL,
    PLAIN,
    Training,
    batches,
    flat,
    listing,
    made,
    starts,
    trained_by,
)
from tests.ranks import Pools

pytestmark = pytest.mark.ranks

#: Workers of two nodes that FCDP shards.
PAIRS: dict[str, Any] = {"worker": "nodes", "nodes_per_worker": 2}
OVER_FCDP = ALL.model_copy(update=PAIRS)
#: Of two workers of two ranks, those with the same part.
PEERS = [(0, 2), (1, 3)]


def test_one_worker_follows_its_displacement_one_round_late(ranks: Pools) -> None:
    (differences,) = ranks.run(1, _one_worker)
    assert differences == [True] * 4


def _one_worker() -> list[bool]:
    """Whether each start is, to the last bit, the one before minus the displacement before that."""
    trained, workers = made(Training(CO2Settings(interval=3, **PLAIN)))
    own = batches(0)
    begins, ends = [flat(trained)], []
    for _ in range(5):
        for _ in range(3):
            before_the_round_ends = workers._done == 2
            if before_the_round_ends:
                end = workers._send
                workers._send = lambda end=end: (ends.append(flat(trained)), end())  # type: ignore[method-assign]
            workers.step([next(own)])
            workers.__dict__.pop("_send", None)
        begins.append(flat(trained))
    assert begins[1].equal(begins[0]), "the first round is taken up by the second"
    return [begins[t + 1].equal(begins[t] - (begins[t - 1] - ends[t - 1])) for t in range(1, 5)]


@pytest.mark.parametrize(
    "training",
    [
        Training(ALL, nodes=2),
        Training(ALL.model_copy(update={"penalty": "first-steps"}), nodes=2, accumulation=2),
        Training(CO2Settings(interval=2, by_learning_rate=True, clip=1.0), nodes=2),
        Training(LocalSGDSettings(interval=3), late=False, nodes=2),
        Training(SlowMoSettings(interval=3), late=False, nodes=2),
        Training(ALL, nodes=2, ranks_per_node=2),
        Training(ALL.model_copy(update={"worker": "node"}), nodes=2, ranks_per_node=2),
        Training(ALL.model_copy(update={"worker": "nodes"}), nodes=2, ranks_per_node=2),
        Training(OVER_FCDP, nodes=4, accumulation=2),
        Training(SlowMoSettings(interval=3, **PAIRS), late=False, nodes=4),
    ],
    ids=[
        *("co2", "in rounds", "by rate", "local sgd", "slowmo", "four ranks", "sharded workers"),
        *("fcdp in a node", "fcdp over nodes", "slowmo over fcdp"),
    ],
)
def test_all_ranks_start_alike_and_as_the_listing_says(ranks: Pools, training: Training) -> None:
    world = training.nodes * training.ranks_per_node
    found = ranks.run(world, starts, training)
    for others in found[1:]:
        assert all(mine.equal(first) for mine, first in zip(others, found[0], strict=True))
    for mine, expected in zip(found[0], listing(training), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_over_fcdp_losses_are_those_of_the_same_workers_unsharded(ranks: Pools) -> None:
    """To the last bit: a worker of two ranks sums as one rank does that takes both their batches.

    Without the penalty, whose norms are sums over a worker's parts.
    """
    over = Training(CO2Settings(interval=3, **{**PLAIN, "outer_momentum": 0.3}, **PAIRS), nodes=4)
    whole = over.settings.model_copy(update={"worker": "rank", "nodes_per_worker": 1})
    apart = ranks.run(4, _over_fcdp, over)
    together = ranks.run(2, _unsharded, Training(whole, nodes=2, accumulation=2))
    for rank, (parameters, losses) in enumerate(apart):
        assert parameters.equal(together[rank // 2][0])
        pair = zip(losses, apart[rank ^ 1][1], together[rank // 2][1], strict=True)
        assert all(((mine + its) / 2).allclose(expected) for mine, its, expected in pair)


def _over_fcdp(training: Training) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return trained_by(training, [batches(torch.distributed.get_rank())])


def _unsharded(training: Training) -> tuple[torch.Tensor, list[torch.Tensor]]:
    first = 2 * torch.distributed.get_rank()
    return trained_by(training, [batches(first), batches(first + 1)])


def test_over_fcdp_a_step_sends_what_fcdp_does_and_a_share_of_the_exchange(ranks: Pools) -> None:
    found = ranks.run(4, _bytes_over_fcdp)
    # 78 parameters in two units, which cross the two nodes of a worker once as parameters and once
    # as gradients; and the displacement, of which a node has half, crosses once in three steps.
    inside, between = 2 * (1 / 2) * 78 * 4, 2 * (1 / 2) * 78 / 2 * 4
    for closed_form, ledger, policy, hits in found:
        assert closed_form == pytest.approx(inside + between / 3)
        assert sum(ledger["inter_node"].values()) == pytest.approx(3 * inside, rel=0.1)
        assert (policy, hits) == ("host", 3)


def _bytes_over_fcdp() -> tuple[float, dict[str, dict[str, float]], str | None, int]:
    _, workers = made(Training(OVER_FCDP, nodes=4))
    own = batches(workers.job.topology.rank)
    workers.step([next(own)])
    workers.take_ledger()
    for _ in range(3):
        workers.step([next(own)])
    workers.settle()
    cache, ledger = workers.cache, workers.take_ledger()
    assert cache is not None
    assert ledger is not None
    return workers.closed_form_bytes, ledger, workers.policy, cache.hits


def test_workers_that_do_not_fit_the_nodes_are_refused(ranks: Pools) -> None:
    ranks.run(4, _does_not_fit)


def _does_not_fit() -> None:
    settings = CO2Settings(worker="nodes", nodes_per_worker=3)
    allowed = r"nodes_per_worker = 3: must divide the cluster's 4 nodes; allowed are 1, 2, 4"
    with pytest.raises(ValueError, match=allowed):
        made(Training(settings, nodes=4))


@pytest.mark.parametrize(
    ("training", "peers"),
    [
        (Training(ALL, nodes=2, ranks_per_node=2), [(0, 1, 2, 3)]),
        (Training(ALL.model_copy(update={"worker": "node"}), nodes=2, ranks_per_node=2), PEERS),
        (Training(OVER_FCDP, nodes=4), PEERS),
        (Training(OVER_FCDP.model_copy(update={"outer_on": "host"}), nodes=4), PEERS),
    ],
    ids=["whole", "sharded", "over fcdp", "on the host"],
)
def test_the_outer_state_is_the_same_to_the_last_bit(
    ranks: Pools, training: Training, peers: list[tuple[int, ...]]
) -> None:
    """After each round, on all ranks that have the same part of it."""
    found = ranks.run(4, _outer_states, training)
    for first, *others in peers:
        assert len(found[first]) == 4
        for other in others:
            assert all(map(torch.equal, found[first], found[other]))
    momentum = found[0][-1][found[0][-1].numel() // 2 :]
    assert momentum.any()


def _outer_states(training: Training) -> list[torch.Tensor]:
    _, workers = made(training)
    own = batches(workers.job.topology.rank)
    found = []
    for step in range(12):
        workers.step([next(own)])
        if step % 3 == 2:
            workers.settle()
            found.append(torch.cat((workers._outer.start, workers._outer.momentum)))
    return found


def test_late_and_waited_for_differ(ranks: Pools) -> None:
    training = Training(CO2Settings(interval=3, **PLAIN), nodes=2)
    late = ranks.run(2, starts, training)[0]
    waited = ranks.run(2, starts, replace(training, late=False))[0]
    assert late[1].equal(late[0])
    assert not waited[1].equal(waited[0])


def test_what_is_sent_is_not_what_is_trained(ranks: Pools) -> None:
    ranks.run(1, _sent_apart)


def _sent_apart() -> None:
    _, workers = made(Training(CO2Settings(interval=2, **PLAIN)))
    own = batches(0)
    for _ in range(2):
        workers.step([next(own)])
    workers.settle()
    sent = workers._average.buffer.clone()
    workers.step([next(own)])
    assert workers._average.buffer.equal(sent)
    assert sent.any()


def test_metrics_are_of_the_updates_since_they_were_taken(ranks: Pools) -> None:
    for found in ranks.run(2, _metrics):
        assert found[0] == {}
        assert found[1]["staleness_gap"] > 1
        assert 0 < found[1]["worker_drift"] <= 1
        assert 0 < found[1]["clipped_fraction"] < 1
        assert found[2] == {}


def _metrics() -> list[dict[str, float]]:
    _, workers = made(Training(ALL, nodes=2))
    own = batches(workers.job.topology.rank)
    found = []
    for _ in range(3):
        workers.step([next(own)])
    found.append(workers.take_metrics())
    for _ in range(9):
        workers.step([next(own)])
    found += [workers.take_metrics(), workers.take_metrics()]
    workers.settle()
    return found

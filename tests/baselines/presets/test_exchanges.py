"""Exchanges as a cell chooses them: over which ring, and how often gradients cross nodes."""

import functools

import pytest

from baselines.settings import CacheSettings, PaperSettings, Settings
from fcdp.grouping import PartialsChoice
from tests.baselines.training import SMALL, Run, Sent, Tuning, sent
from tests.ranks import Pools

ACCUMULATION = 3
FLAT = CacheSettings(exchanges="flat")


@functools.cache
def node(ranks: Pools, strategy: str, tuning: Tuning, chosen: Settings) -> Sent:
    run = Run(2, 2, ACCUMULATION, "gpt2", tuning, **SMALL)
    return ranks.run(4, sent, run, strategy, chosen)[0]


@pytest.mark.parametrize(
    ("tuning", "chosen", "times"),
    [
        ("full", CacheSettings(partial_gradients="each"), 1),
        ("full", CacheSettings(exchanges="undeferred"), 1),
        # Three quarters of a ring's buffer over an edge, and half of it across.
        ("full", FLAT, 3 / 2),
        ("lora", FLAT, 3 / 2),
    ],
)
def test_gradients_of_each_micro_batch_cross_nodes(
    ranks: Pools, tuning: Tuning, chosen: CacheSettings, times: float
) -> None:
    ours, theirs = (node(ranks, "fcdp", tuning, each) for each in (CacheSettings(), chosen))
    for each in (ours, theirs):
        assert sum(each.across.values()) == each.least
    assert theirs.across["reduce"] == ACCUMULATION * times * ours.across["reduce"]
    assert theirs.across.get("forward", 0) == times * ours.across.get("forward", 0)
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-5)
    if chosen == FLAT:
        assert node(ranks, "fcdp-paper", tuning, PaperSettings()) == theirs


@pytest.mark.parametrize("place", ["auto", "host"])
def test_sums_wait_where_a_cell_says(ranks: Pools, place: PartialsChoice) -> None:
    """Two sums of three micro-batches go out to the host and come in again."""
    usual, chosen = (
        node(ranks, "fcdp", "full", CacheSettings(partial_gradients=each))
        for each in ("device", place)
    )
    assert (usual.across, usual.losses) == (chosen.across, chosen.losses)
    for link in ("host_to_device", "device_to_host"):
        moved = chosen.ledger.get(link, {}).get("reduce", 0)
        assert moved == (2 * chosen.sums if place == "host" else 0)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_over_hierarchical_exchanges_a_node_sends_the_least_that_fsdp2s_schedule_must(
    ranks: Pools, tuning: Tuning
) -> None:
    ours = node(ranks, "fsdp2-hierarchical", tuning, Settings())
    assert sum(ours.across.values()) == pytest.approx(ours.least, rel=0.03)
    # Two nodes of two: as much is passed on inside as has come, and as much of the own.
    assert ours.ledger["intra_node"] == {name: 2 * count for name, count in ours.across.items()}


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_node_of_replicas_sends_gradients_out_and_back_once(ranks: Pools, tuning: Tuning) -> None:
    """The closed form of DDP and of hybrid shards, too."""
    ours = node(ranks, "replicated", tuning, Settings())
    assert sum(ours.across.values()) == pytest.approx(ours.least, rel=0.03)

"""Exchanges as a cell chooses them: over which ring, and how often gradients cross nodes."""

import pytest

from baselines.settings import CacheSettings, PaperSettings
from baselines.settings import Settings as StrategySettings
from docs.memory import partials
from fcdp.engine import engine_of
from fcdp.grouping import PartialsChoice
from tests.baselines.training import Settings, Tuning, made, step
from tests.ranks import Pools

ACCUMULATION = 3
FLAT = CacheSettings(exchanges="flat")


def sent(strategy: str, tuning: Tuning, chosen: StrategySettings) -> dict[str, float]:
    """Bytes that a node of two sends in a steady step, by phase; the closed form; losses' sum."""
    settings = Settings("gpt2", tuning, ranks_per_node=2, accumulation=ACCUMULATION, chosen=chosen)
    trainable, batches = made(strategy, settings)
    total = 0.0
    for _ in range(2):
        trainable.take_ledger()
        total += step(trainable, batches)
    ledger = trainable.take_ledger()
    return {**ledger["inter_node"], "closed form": trainable.closed_form_bytes, "loss": total}


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
    ours, theirs = (
        ranks.run(4, sent, "fcdp", tuning, each)[0] for each in (CacheSettings(), chosen)
    )
    for counts in (ours, theirs):
        phases = [nbytes for name, nbytes in counts.items() if name not in ("closed form", "loss")]
        assert sum(phases) == counts["closed form"]
    assert theirs["reduce"] == ACCUMULATION * times * ours["reduce"]
    assert theirs.get("forward", 0) == times * ours.get("forward", 0)
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    if chosen == FLAT:
        assert ranks.run(4, sent, "fcdp-paper", tuning, PaperSettings())[0] == theirs


@pytest.mark.parametrize("place", ["auto", "host"])
def test_sums_wait_where_a_cell_says(ranks: Pools, place: PartialsChoice) -> None:
    """Two sums of three micro-batches go out to the host and come in again."""
    usual, chosen = (
        ranks.run(4, copied, CacheSettings(partial_gradients=each))[0] for each in ("device", place)
    )
    assert usual["inter_node"] == chosen["inter_node"]
    assert usual["loss"] == chosen["loss"]
    moved = 2 * chosen["sums"] if place == "host" else 0
    assert (chosen["host_to_device"], chosen["device_to_host"]) == (moved, moved)


def copied(chosen: StrategySettings) -> dict[str, float]:
    """Bytes of reductions that a node of two moves in a step by link, and of its sums; the loss."""
    settings = Settings("gpt2", "full", ranks_per_node=2, accumulation=ACCUMULATION, chosen=chosen)
    trainable, batches = made("fcdp", settings)
    trainable.take_ledger()
    loss = step(trainable, batches)
    ledger = trainable.take_ledger()
    links = ("inter_node", "host_to_device", "device_to_host")
    units = engine_of(trainable.model).units
    sums = partials(units, nodes=2)
    of_links = {link: ledger.get(link, {}).get("reduce", 0) for link in links}
    return {**of_links, "sums": 2 * sums, "loss": loss}

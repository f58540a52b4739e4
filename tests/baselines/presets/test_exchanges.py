"""Exchanges as a cell chooses them: over which ring, and how often gradients cross nodes."""

import pytest

from baselines.settings import CacheSettings, Exchanges, PaperSettings
from baselines.settings import Settings as StrategySettings
from tests.baselines.training import Settings, Tuning, made, step
from tests.ranks import Pools

ACCUMULATION = 3


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
    ("tuning", "exchanges", "times"),
    [
        ("full", "undeferred", 1),
        # Three quarters of a ring's buffer over an edge, and half of it across.
        ("full", "flat", 3 / 2),
        ("lora", "flat", 3 / 2),
    ],
)
def test_gradients_of_each_micro_batch_cross_nodes(
    ranks: Pools, tuning: Tuning, exchanges: Exchanges, times: float
) -> None:
    ours, theirs = (
        ranks.run(4, sent, "fcdp", tuning, CacheSettings(exchanges=each))[0]
        for each in ("hierarchical", exchanges)
    )
    for counts in (ours, theirs):
        phases = [nbytes for name, nbytes in counts.items() if name not in ("closed form", "loss")]
        assert sum(phases) == counts["closed form"]
    assert theirs["reduce"] == ACCUMULATION * times * ours["reduce"]
    assert theirs.get("forward", 0) == times * ours.get("forward", 0)
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    if exchanges == "flat":
        assert ranks.run(4, sent, "fcdp-paper", tuning, PaperSettings())[0] == theirs

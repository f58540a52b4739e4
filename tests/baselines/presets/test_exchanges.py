"""What crosses nodes as a cell chooses it: how often gradients do, and what is simulated alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch.nn as nn

from baselines.presets import fcdp
from baselines.settings import CacheSettings, Exchanges
from tests.baselines.jobs import job
from tests.baselines.training import Settings, Tuning, made
from tests.ranks import Pools

ACCUMULATION = 3


def sent(tuning: Tuning, chosen: CacheSettings) -> dict[str, float]:
    """Bytes that a node of two sends in a steady step, by phase; the closed form; losses' sum."""
    settings = Settings("gpt2", tuning, ranks_per_node=2, accumulation=ACCUMULATION, chosen=chosen)
    trainable, batches = made("fcdp", settings)
    total = 0.0
    for _ in range(3):
        trainable.take_ledger()
        total += trainable.step([next(batches) for _ in range(ACCUMULATION)]).item()
    ledger = trainable.take_ledger()
    assert ledger is not None
    return {**ledger["inter_node"], "closed form": trainable.closed_form_bytes, "loss": total}


@pytest.mark.parametrize(("tuning", "adapters"), [("full", "sharded"), ("lora", "replicated")])
def test_gradients_of_each_micro_batch_cross_nodes(
    ranks: Pools, tuning: Tuning, adapters: Literal["sharded", "replicated"]
) -> None:
    ours, theirs = (
        ranks.run(4, sent, tuning, CacheSettings(exchanges=exchanges, adapters=adapters))[0]
        for exchanges in get_args(Exchanges)[:2]
    )
    for found in (ours, theirs):
        phases = [nbytes for name, nbytes in found.items() if name not in ("closed form", "loss")]
        assert sum(phases) == found["closed form"]
    assert theirs["reduce"] == ACCUMULATION * ours["reduce"]
    assert theirs.get("forward") == ours.get("forward")
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-5)


def test_flat_exchanges_are_refused() -> None:
    chosen = CacheSettings(exchanges="flat")
    with pytest.raises(ValueError, match="exchanges = 'flat': flat exchanges are simulated alone"):
        fcdp.build(nn.Linear(2, 2), replace(job([]), settings=chosen))

"""FCDP trains like FSDP2: the same losses, gradients' norms and parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fcdp.training import Result, Settings, train
from tests.ranks import Pools

TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (2, 3)]


def compare(ranks: Pools, settings: Settings, *, against: str = "fsdp2", exact: bool) -> Result:
    """Train with both engines on the same ranks; return what FCDP gave on rank 0."""
    expected = ranks.run(settings.world_size, train, settings, against)
    actual = ranks.run(settings.world_size, train, settings, "fcdp")
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-6}
    for wanted, got in zip(expected, actual, strict=True):
        for field in ("losses", "norms"):
            torch.testing.assert_close(
                torch.tensor(getattr(got, field)), torch.tensor(getattr(wanted, field)), **tolerance
            )
        assert got.params.keys() == wanted.params.keys()
        for name, param in wanted.params.items():
            torch.testing.assert_close(got.params[name], param, **tolerance, msg=name)
    assert len(set(expected[0].losses)) > 1, "the reference did not train"
    return actual[0]


def sums_alike(settings: Settings) -> bool:
    """Two summands have one order; with more, gloo's ring and the hierarchy differ."""
    return settings.world_size <= 2


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("adapter_rank", [0, 3], ids=["full", "adapters"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), TOPOLOGIES)
def test_training_matches_fsdp2(
    ranks: Pools,
    nodes: int,
    ranks_per_node: int,
    adapter_rank: int,
    accumulation: int,
    request: pytest.FixtureRequest,
) -> None:
    """Twenty steps on two nodes; elsewhere five, and some, as time allows."""
    exhaustive = request.config.getoption("--exhaustive")
    if not exhaustive and nodes * ranks_per_node > 4 and bool(adapter_rank) != (accumulation > 1):
        pytest.skip("six ranks: the rest runs with --exhaustive")
    steps = 20 if exhaustive or (nodes, ranks_per_node) == (2, 1) else 5
    settings = Settings(
        nodes, ranks_per_node, adapter_rank=adapter_rank, accumulation=accumulation, steps=steps
    )
    # With several micro-batches FCDP adds them up before the ranks, FSDP2 after.
    exact = settings.world_size == 1 or (sums_alike(settings) and accumulation == 1)
    compare(ranks, settings, exact=exact)


VARIANTS = {
    "called_twice": {"twice": True},
    "checkpointing": {"checkpointing": True},
    "checkpointing_adapters": {"checkpointing": True, "adapter_rank": 3},
    "checkpointing_small_adapters": {"checkpointing": True, "adapter_rank": 1},
    "small_adapters_called_twice": {"twice": True, "adapter_rank": 1},
    "small_adapters_clipped": {"clip": 0.1, "adapter_rank": 1},
    "eval_between_steps": {"events": {1: "eval", 3: "eval"}},
    "eval_between_steps_adapters": {"events": {1: "eval", 3: "eval"}, "adapter_rank": 3},
    "load_state_dict": {"events": {2: "load"}},
    "load_state_dict_frozen": {"events": {2: "load"}, "adapter_rank": 3},
    "in_place_write": {"events": {2: "write"}},
    "in_place_write_frozen": {"events": {2: "write"}, "adapter_rank": 3},
    "in_place_write_on_one_rank": {"events": {2: "write_one_rank"}, "adapter_rank": 3},
    "clip_grad_norm": {"clip": 0.1},
    "fused_optimizer": {"optimizer": "fused"},
    "sgd": {"optimizer": "sgd"},
    "kept_after_forward": {"reshard_after_forward": False},
    "freeze_in_mid_run": {"events": {2: "freeze"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_fsdp2(ranks: Pools, variant: str) -> None:
    """On ranks whose sums have one order; 2 × 2 follows from the next test."""
    settings = replace(Settings(2, 1), **VARIANTS[variant])
    # Factors of one row are cut within it, and their norms add up in another order.
    compare(ranks, settings, exact=variant != "small_adapters_clipped")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_changes_no_bit(ranks: Pools, variant: str) -> None:
    """With the same reduction, cached and uncached gathers must give equal bits anywhere."""
    settings = replace(Settings(2, 2), **VARIANTS[variant])
    result = compare(ranks, settings, against="uncached", exact=True)
    gathered_again = variant != "kept_after_forward"
    assert (result.hits > 0) == gathered_again


@pytest.mark.parametrize("adapter_rank", [0, 3], ids=["full", "adapters"])
def test_bfloat16_gathers_match_fsdp2(ranks: Pools, adapter_rank: int) -> None:
    settings = Settings(2, 1, adapter_rank=adapter_rank, param_dtype=torch.bfloat16)
    compare(ranks, settings, exact=True)

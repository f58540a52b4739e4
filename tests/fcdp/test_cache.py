"""The host arena: layout, size, and what is refused before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fcdp
from fcdp.cache import HostCache, _HostTier
from tests.fcdp.training import Settings, make_model, shard_with_fcdp, topology_of
from tests.ranks import Pools


@dataclass(frozen=True)
class Place:
    """The part of a topology that the cache looks at."""

    nodes: int
    node: int
    ranks_per_node: int = 1


@dataclass(eq=False)
class Entry:
    """The part of a unit that the cache looks at."""

    name: str
    shard_bytes: int


def tier(units: list[Any], place: Any) -> _HostTier:
    return _HostTier(units, place, torch.device("cpu"))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(2, 5), st.data())
def test_what_is_stored_comes_back_and_the_own_row_is_left_alone(
    numels: list[int], nodes: int, data: st.DataObject
) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    units = [Entry(str(index), 4 * numel) for index, numel in enumerate(numels)]
    cache = tier(units, Place(nodes, node))
    stored = [torch.randn(nodes, numel) for numel in numels]
    for unit, shards in zip(units, stored, strict=True):
        assert cache.generation(unit) == 0
        assert cache.store(unit, shards.unbind(), 1) == (nodes - 1) * unit.shard_bytes
    for unit, shards in zip(units, stored, strict=True):
        assert cache.generation(unit) == 1
        loaded = torch.full_like(shards, torch.nan)
        cache.load(unit, loaded.unbind())
        assert loaded[node].isnan().all()
        others = [index for index in range(nodes) if index != node]
        assert torch.equal(loaded[others], shards[others])
    assert sum((nodes - 1) * unit.shard_bytes for unit in units) <= cache.host_bytes


def test_an_entry_holds_any_dtype_that_the_unit_gathers() -> None:
    odd, unit = Entry("odd", 3), Entry("unit", 6)
    cache = tier([odd, unit], Place(2, 0))
    shards = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
    cache.store(unit, shards.unbind(), 1)
    loaded = torch.zeros_like(shards)
    cache.load(unit, loaded.unbind())
    assert torch.equal(loaded[1], shards[1])


def refuse_on_one_rank() -> str:
    """Only rank 1's node is short of memory; no rank may wait for another."""
    topology = topology_of(2, 1)
    settings = Settings(2, 1)
    available = 100 if topology.rank == 1 else 2**40
    with (
        mock.patch("fcdp.cache._available_host_memory", return_value=available),
        pytest.raises((ValueError, RuntimeError)) as error,
    ):
        shard_with_fcdp(make_model(settings), topology, settings)
    return str(error.value)


def test_too_little_host_memory_is_refused_on_all_ranks(ranks: Pools) -> None:
    healthy, short = ranks.run(2, refuse_on_one_rank)
    assert "policy = HostCache()" in short
    assert "host memory are free" in short
    assert "another rank could not build its cache" in healthy


def arena_bytes() -> tuple[int, int]:
    topology = topology_of(2, 2)
    settings = Settings(2, 2)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    padded = sum(
        -(-param.shape[0] // 4) * 4 * param[0].numel() * 4
        for param in make_model(settings).parameters()
    )
    return fcdp.ledger(model).host_cache_bytes, padded


def test_a_node_holds_what_the_other_nodes_own(ranks: Pools) -> None:
    """(n−1)/n of the gathered model a node, 1/L of that a rank, plus alignment."""
    held, gathered = ranks.run(4, arena_bytes)[0]
    assert gathered / 2 / 2 <= held < gathered / 2 / 2 + 4 * 512


def test_policies_are_values() -> None:
    assert HostCache() == HostCache()
    assert fcdp.NoCache() == fcdp.NoCache()

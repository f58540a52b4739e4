"""``DataLoader`` workers beside a cached model: forked from it, or spawned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fcdp
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, adam
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


class Numbers(Dataset[torch.Tensor]):
    """Each item is made from its index, wherever it is asked for."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index))


def train(policy: fcdp.CachePolicy, method: str | None, workers: int) -> list[float]:
    """Two epochs; workers start when the cache has entries, and end while it is in use."""
    run = Run(topology_of(2, 1), cached=True)
    model = mlps(2, 6)
    run.shard([*model, model])
    run.cache(model, policy=policy)
    optimizer = adam(model)
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=run.topology.rank)
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context=method if workers else None,
    )
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(batch).sum()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    run.check_gathers()
    assert fcdp.ledger(model).hits > 0
    return losses


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that may have children, which daemons may not."""
    pool = RankPool(2, daemon=False)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> list[list[float]]:
    return pool.run(train, fcdp.HostCache(), None, 0)


def test_workers_change_nothing(pool: RankPool, expected: list[list[float]]) -> None:
    assert pool.run(train, fcdp.HostCache(), "fork", 1) == expected
    assert len(set(expected[0])) == 8


def test_forked_workers_leave_the_disk_cache_alone(
    pool: RankPool, expected: list[list[float]], tmp_path: Path
) -> None:
    assert pool.run(train, fcdp.DiskCache(tmp_path), "fork", 2) == expected

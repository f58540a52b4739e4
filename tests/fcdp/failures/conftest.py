"""One process that plays all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from fcdp import failure


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Become another rank of a job whose store lives in this process; nothing looks by itself."""
    store = dist.HashStore()
    monkeypatch.setattr(failure, "_get_default_store", lambda: store)
    monkeypatch.setattr(failure, "watch", lambda failures: None)
    monkeypatch.setattr(failure, "PAUSE_S", 0.01)

    def become(rank: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    become(0)
    return become

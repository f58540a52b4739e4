"""A wait over gloo that another thread ends."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fcdp import failure
from tests.fcdp.failures.made_up import SOON_S
from tests.ranks import on_ranks


@pytest.mark.parametrize("kind", ["receive", "send", "all-reduce"])
@on_ranks(2)
def test_any_wait_over_gloo_can_be_ended(kind: str) -> None:
    """Another thread breaks the group in mid-exchange, on rank 0."""
    began = time.monotonic()
    group = dist.new_group(timeout=timedelta(seconds=150))
    if dist.get_rank() == 0:
        works = {
            "receive": lambda: group.recv([torch.empty(3)], 1, 0),
            "send": lambda: group.send([torch.empty(1 << 26)], 1, 0),
            "all-reduce": lambda: group.allreduce([torch.ones(3)]),
        }
        work = works[kind]()
        thread = threading.Timer(0.3, failure.break_all, [failure.backends_of(group)])
        thread.start()
        with pytest.raises(RuntimeError):
            work.wait()
        thread.join()
    dist.barrier()
    assert time.monotonic() - began < SOON_S

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
from tests.ranks import Pools


def _break(kind: str) -> str:
    """Break a group in mid-exchange from another thread, on rank 0; what rank 0 then sees."""
    group = dist.new_group(timeout=timedelta(seconds=150))
    try:
        if dist.get_rank() != 0:
            return "done"
        works = {
            "receive": lambda: group.recv([torch.empty(3)], 1, 0),
            "send": lambda: group.send([torch.empty(1 << 26)], 1, 0),
            "all-reduce": lambda: group.allreduce([torch.ones(3)]),
        }
        work = works[kind]()
        thread = threading.Timer(0.3, failure.break_all, [failure.backends_of(group)])
        thread.start()
        try:
            work.wait()
        except RuntimeError:
            return "broken"
        finally:
            thread.join()
        return "done"
    finally:
        dist.barrier()


@pytest.mark.parametrize("kind", ["receive", "send", "all-reduce"])
def test_any_wait_over_gloo_can_be_ended(kind: str, ranks: Pools) -> None:
    began = time.monotonic()
    assert ranks.run(2, _break, kind) == ["broken", "done"]
    assert time.monotonic() - began < SOON_S

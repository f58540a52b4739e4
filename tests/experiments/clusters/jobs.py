"""What the ranks of the tests' jobs do; imported by name inside them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def add_up() -> None:
    """One all-reduce over all ranks."""
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group()

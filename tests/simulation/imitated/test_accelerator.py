"""The imitated accelerator counts what is alive, where it is alive."""

import torch

from simulation.imitated.accelerator import NAME, imitated
from tests.ranks import Pools
from tests.simulation.imitated.small import leave_group


def life_of_tensors() -> None:
    """Device bytes after each of several events, and the host's."""
    leave_group()
    with imitated(10**9) as allocations:
        device = torch.device(NAME)

        def check(nbytes: int) -> None:
            assert allocations.current[NAME] == nbytes

        first = torch.empty(1024, device=device)
        check(4096)
        view = first.view(32, 32)[1]
        check(4096)
        second = first + 1
        check(8192)
        second.add_(first)
        check(8192)
        second.untyped_storage().resize_(0)
        check(4096)
        second.untyped_storage().resize_(4096)
        check(8192)
        del first
        check(8192)  # it is still viewed
        del view
        check(4096)
        small = torch.empty(1, dtype=torch.uint8, device=device)
        check(4096 + 512)  # a block of the allocator
        host = small.cpu()
        check(4096 + 512)
        assert allocations.current["cpu"] == 512
        del host, small, second
        check(0)
        assert allocations.peak[NAME] == 8192
        allocations.reset_peak()
        assert allocations.peak[NAME] == 0


def test_bytes_follow_the_life_of_storages(apart: Pools) -> None:
    apart.run(1, life_of_tensors)

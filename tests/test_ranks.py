"""The processes that tests of several ranks share."""

import torch.distributed as dist

from tests.ranks import Pools


def make_group(of: tuple[int, ...], makers: tuple[int, ...]) -> None:
    if dist.get_rank() in makers:
        dist.new_group(of, use_local_synchronization=of == makers)


def meet() -> None:
    """In groups that torch names by a number and by a hash."""
    for together in (False, True):
        dist.barrier(dist.new_group([0, 1, 2, 3], use_local_synchronization=together))


def test_groups_of_some_ranks_are_no_later_tests(ranks: Pools) -> None:
    for of, makers in [((0,), (0, 1, 2, 3)), ((1,), (1,)), ((0, 2), (0, 1, 2, 3))]:
        ranks.run(4, make_group, of, makers)
        ranks.run(4, meet, timeout_s=60)

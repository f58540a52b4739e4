"""A rank that fails in training ends the waits of the others, with its error in their messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fcdp import failure
from fcdp.failure import RankFailed
from tests.fcdp.training import Run, Settings, TinyLM
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Four ranks that no other test uses afterwards."""
    pool = RankPool(4)
    yield pool
    pool.close()


def _raise_in(where: str, model: TinyLM) -> Callable[[], None]:
    """Have a pass raise, until the returned function is called."""

    def hook(module: torch.nn.Module, given: object) -> None:
        raise ValueError("no label")

    if where == "forward":
        return model.blocks[1].register_forward_pre_hook(hook).remove
    return model.blocks[0].register_full_backward_pre_hook(hook).remove


def _train(settings: Settings, where: str, failing: tuple[int, ...]) -> tuple[list[str], float]:
    """Five steps, of which the second fails on some ranks, which catch their own error."""
    torch.manual_seed(0)
    failure.POLL_S = 0.2
    done = dist.new_group()  # the pool's own group is among those that a failure breaks
    run = Run(settings)
    seen: list[str] = []
    began = time.monotonic()
    try:
        for step in range(5):
            fails = step == 1 and run.topology.rank in failing
            mend = _raise_in(where, run.model) if fails else lambda: None
            try:
                run.step()
                seen.append("trained")
            except ValueError as error:
                seen.append(str(error))
                run.optimizer.zero_grad()
            finally:
                mend()
    except RankFailed as error:
        seen.append(str(error))
    took = time.monotonic() - began
    dist.barrier(done)
    return seen, took


@pytest.mark.parametrize(("where", "shape"), [("forward", (2, 2)), ("backward", (4, 1))])
def test_one_rank_fails(where: str, shape: tuple[int, int], own_ranks: RankPool) -> None:
    settings = replace(Settings(), nodes=shape[0], ranks_per_node=shape[1])
    for rank, (seen, took) in enumerate(own_ranks.run(_train, settings, where, (3,))):
        expected = "ValueError: no label" if where == "forward" else "a backward did not end"
        assert seen[: -1 if rank != 3 else 2] == ["trained", "no label"][: 2 if rank == 3 else 1]
        assert seen[-1].startswith("rank 3 failed:")
        assert expected in seen[-1]
        assert took < 60


def test_all_ranks_fail_alike(own_ranks: RankPool) -> None:
    for where in ("forward", "backward"):
        for seen, _ in own_ranks.run(_train, Settings(), where, (0, 1, 2, 3)):
            assert seen == ["trained", "no label", "trained", "trained", "trained"]

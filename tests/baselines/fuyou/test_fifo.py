"""Which blocks are read when, on a store that notes it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch
import torch.nn as nn

from baselines.fuyou.copies import Copies
from baselines.fuyou.fifo import Fifo
from baselines.fuyou.layout import Group, Layout, laid_out
from baselines.fuyou.memory import Dram

CPU = torch.device("cpu")
BLOCKS = 5


class _Store:
    """Fills what is read with the group's number."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def read_segment(self, group: Group, segment: object, memory: torch.Tensor) -> Future[int]:
        self.reads.append(group.index)
        memory.view(torch.float32).fill_(group.index)
        read: Future[int] = Future()
        read.set_result(0)
        return read


def _made(slots: int) -> tuple[list[nn.Linear], Layout, _Store, Dram, Fifo]:
    """Frozen blocks, which one after another are computed."""
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(BLOCKS)]
    for block in blocks:
        block.requires_grad_(False)
    layout = laid_out(nn.Sequential(*blocks), blocks, torch.float32, aside=False)
    store, dram = _Store(), Dram(2**20, CPU)
    return blocks, layout, store, dram, Fifo(layout, cast(Any, store), dram, Copies(CPU), slots)


def _pass(fifo: Fifo) -> None:
    """Forward and backward."""
    order = [*range(BLOCKS), *reversed(range(BLOCKS))]
    fifo.expect(order)
    for block in order:
        fifo.acquire(block)
        fifo.release(block)
    fifo.stop()


def test_host_memory_keeps_what_forward_waits_for_and_backward_does_not_have() -> None:
    _, layout, store, dram, fifo = _made(slots=3)
    kept = 2
    spare = dram.free - kept * layout.blocks[0].compute_bytes
    assert fifo.cache(dram, spare) == kept
    store.reads.clear()
    _pass(fifo)
    fifo.close()
    # The slots have the last three from forward to backward.
    assert sorted(store.reads) == [layout.blocks[block].groups[0].index for block in (2, 3, 4)]


@pytest.mark.parametrize("slots", [2, 3, 9])
def test_the_last_blocks_of_forward_stay_for_backward(slots: int) -> None:
    blocks, layout, store, _, fifo = _made(slots)
    order = [*range(BLOCKS), *reversed(range(BLOCKS))]
    fifo.expect(order)
    for block in order:
        fifo.acquire(block)
        (group,) = layout.blocks[block].groups
        assert blocks[block].weight.unique().tolist() == [group.index]
        fifo.release(block)
    with pytest.raises(RuntimeError, match="the model computed block 0 out of turn"):
        fifo.acquire(0)
    fifo.close()
    assert len(store.reads) == BLOCKS + max(0, BLOCKS - slots)

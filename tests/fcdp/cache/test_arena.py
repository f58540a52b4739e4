"""The block of host memory: how it is handed out, and how long it is page-locked."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.cache.arena import ALIGNMENT, Arena
from fcdp.cache.tiers.disk import DiskTier
from fcdp.cache.tiers.host import HostTier
from fcdp.ledger import Ledger
from fcdp.partial_gradients import Partials
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit

PLACE: Any = Place(2, 0)
UNIT: Any = StandInUnit("unit", 8)


def test_parts_are_aligned_and_do_not_overlap() -> None:
    arena = Arena(ALIGNMENT + 100, CPU)
    first, second = arena.take(1), arena.take(100)
    assert arena.memory.data_ptr() % ALIGNMENT == 0
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    with pytest.raises(AssertionError, match="planned too small"):
        arena.take(1)


@pytest.fixture
def made() -> Iterator[list[weakref.ref[Arena]]]:
    """All arenas that are made; one that has gone is page-locked no more."""
    arenas: list[weakref.ref[Arena]] = []
    make = Arena.__init__

    def note(self: Arena, *args: Any, **kwargs: Any) -> None:
        arenas.append(weakref.ref(self))
        make(self, *args, **kwargs)

    with mock.patch.object(Arena, "__init__", note):
        yield arenas


def holders(directory: Any) -> dict[str, Any]:
    sharded: Any = mock.Mock(trainable=True, params=[torch.zeros(2)], shard_numel=2)
    return {
        "host": lambda: HostTier([UNIT], PLACE, CPU, STREAMS, poison=False),
        "disk": lambda: DiskTier([UNIT], PLACE, CPU, STREAMS, directory, buffers=2),
        "partial gradients": lambda: Partials("host", [sharded], PLACE, CPU, Ledger()),
    }


@pytest.mark.parametrize("name", ["host", "disk", "partial gradients"])
def test_an_arena_lives_as_long_as_what_uses_its_memory(
    name: str, made: list[weakref.ref[Arena]], tmp_path: Any
) -> None:
    holder = holders(tmp_path)[name]()
    gc.collect()
    assert [arena() is not None for arena in made] == [True]
    del holder
    gc.collect()
    assert made[0]() is None

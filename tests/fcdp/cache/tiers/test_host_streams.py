"""No entry is read before its copy has landed, and none is overwritten while it is read.

On a stand-in for streams (tests/fcdp/tiers/streams.py); test_host_cuda.py asks real ones.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.cache.tiers.host import HostTier
from tests.fcdp.cache.tiers.streams import Accelerator, Stream
from tests.fcdp.stand_ins import Entry, Place

PLACE: Any = Place(2, 0)
DEVICE: Any = SimpleNamespace(type="stand-in")
ACTIONS = 40
ORDERS = 60


def read_something_else(seed: int) -> bool:
    """Store, expect, load and drop units by chance; whether a load ever saw other values."""
    chance = random.Random(seed)
    accelerator = Accelerator()
    units: list[Any] = [Entry(str(index), 4) for index in range(3)]
    stored: dict[Any, int] = {}
    wrong = []
    streams = [Stream(), Stream()]  # FSDP2 gathers on a stream of its own, or on the current one

    def store(unit: Any, value: int) -> None:
        shards = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
        accelerator.issue(lambda: shards[1].fill_(value))  # as the gather does
        tier.store(unit, shards)
        stored[unit] = value

    def load(unit: Any) -> None:
        shards = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
        wanted = stored[unit]
        tier.load(unit, shards)
        accelerator.issue(lambda: wrong.append(shards[1].item() != wanted))  # as the compute does

    with accelerator.in_place_of_torchs():
        tier = HostTier(units, PLACE, DEVICE, look_ahead=chance.randint(0, 2), poison=False)
        for value in range(1, ACTIONS):
            unit = chance.choice(units)
            stream = chance.choice(streams)
            action = chance.choice(["store", "expect", "load", "load", "drop"])
            with accelerator.stream(stream):
                if action == "store" or unit not in stored:
                    store(unit, value)
                elif action == "expect":
                    tier.expect(unit)
                elif action == "load":
                    load(unit)
                else:
                    tier.drop(unit)
                    del stored[unit]
    accelerator.run_in_some_order(chance)
    return any(wrong)


def test_every_order_that_the_events_allow_gives_what_was_stored() -> None:
    assert not any(map(read_something_else, range(ORDERS)))


@pytest.mark.parametrize("forgotten", ["wait_event", "wait_stream"])
def test_a_forgotten_wait_shows(forgotten: str) -> None:
    with mock.patch.object(Stream, forgotten):
        assert any(map(read_something_else, range(ORDERS)))

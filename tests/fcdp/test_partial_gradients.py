"""Partial gradients that wait, wherever they wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fcdp.arena import Arena
from fcdp.counts import Ledger
from fcdp.partial_gradients import OnDevice, OnHost


def partials(place: str, ledger: Ledger) -> Any:
    if place == "device":
        return OnDevice(ledger)
    return OnHost(Arena(64, torch.device("cpu")).take(64), ledger)


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_buffer_of_fsdp2s_may_change_after_it_was_added(place: str) -> None:
    waiting = partials(place, Ledger())
    partial = torch.ones(4)
    waiting.add(partial, owned=False)
    partial.fill_(100.0)
    assert waiting.take(torch.full((4,), 2.0)).tolist() == [3.0] * 4
    assert waiting.numel == 0


@pytest.mark.parametrize("place", ["device", "host"])
def test_narrow_gradients_are_added_in_single_precision(place: str) -> None:
    waiting = partials(place, Ledger())
    for value in (1.0, 2**-9, 2**-9):
        waiting.add(torch.tensor([value], dtype=torch.bfloat16), owned=True)
    assert waiting.count == 3
    total = waiting.take(torch.tensor([2**-8 - 2**-10], dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    # Added up in bfloat16 the small ones would each have been rounded away.
    assert total.item() == 1 + 2**-7 - 2**-10
    assert waiting.count == 0


@pytest.mark.parametrize("place", ["device", "host"])
def test_what_is_discarded_waits_no_more(place: str) -> None:
    ledger = Ledger()
    waiting = partials(place, ledger)
    waiting.add(torch.ones(4), owned=True)
    assert waiting.numel == 4
    waiting.discard()
    assert waiting.numel == ledger.pending_bytes == 0

"""Partial gradients that wait, wherever they wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fcdp.arena import Arena
from fcdp.counts import Ledger
from fcdp.partial_gradients import OnDevice, OnHost


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture(params=["device", "host"])
def waiting(request: pytest.FixtureRequest, ledger: Ledger) -> Any:
    if request.param == "device":
        return OnDevice(ledger)
    return OnHost(Arena(64, torch.device("cpu")).take(64), ledger)


def test_a_buffer_of_fsdp2s_may_change_after_it_was_added(waiting: Any) -> None:
    partial = torch.ones(4)
    waiting.add(partial, owned=False)
    partial.fill_(100.0)
    assert waiting.take(torch.full((4,), 2.0)).tolist() == [3.0] * 4
    assert waiting.numel == 0


def test_a_sum_that_was_taken_is_nobody_elses(waiting: Any) -> None:
    waiting.add(torch.ones(4), owned=True)
    taken = waiting.take(torch.ones(4))
    waiting.add(torch.full((4,), 9.0), owned=True)
    assert taken.tolist() == [2.0] * 4


def test_narrow_gradients_are_added_in_single_precision(waiting: Any) -> None:
    for value in (1.0, 2**-9, 2**-9):
        waiting.add(torch.tensor([value], dtype=torch.bfloat16), owned=True)
    assert waiting.count == 3
    total = waiting.take(torch.tensor([2**-8 - 2**-10], dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    # Added up in bfloat16 the small ones would each have been rounded away.
    assert total.item() == 1 + 2**-7 - 2**-10
    assert waiting.count == 0


def test_what_is_discarded_waits_no_more(waiting: Any, ledger: Ledger) -> None:
    waiting.add(torch.ones(4), owned=True)
    assert waiting.numel == 4
    waiting.discard()
    assert waiting.numel == ledger.pending_bytes == 0


def test_each_copy_to_the_host_and_back_is_counted(ledger: Ledger) -> None:
    waiting = OnHost(Arena(64, torch.device("cpu")).take(64), ledger)
    for _ in range(3):
        waiting.add(torch.ones(4, dtype=torch.bfloat16), owned=True)
    waiting.take(torch.ones(4))
    for link in ("device_to_host", "host_to_device"):
        assert ledger.bytes[link] == {"reduce": 3 * 4 * 4}, link

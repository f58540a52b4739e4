"""Partial gradients that wait."""

from __future__ import annotations

import torch

from fcdp.counts import Ledger
from fcdp.partial_gradients import PartialGradients


def test_a_buffer_of_fsdp2s_may_change_after_it_was_added() -> None:
    waiting = PartialGradients(Ledger())
    partial = torch.ones(4)
    waiting.add(partial, owned=False)
    partial.fill_(100.0)
    assert waiting.take(torch.full((4,), 2.0)).tolist() == [3.0] * 4
    assert waiting.numel == 0


def test_narrow_gradients_are_added_in_single_precision() -> None:
    waiting = PartialGradients(Ledger())
    for value in (1.0, 2**-9, 2**-9):
        waiting.add(torch.tensor([value], dtype=torch.bfloat16), owned=True)
    assert waiting.count == 3
    total = waiting.take(torch.tensor([2**-8 - 2**-10], dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    # Added up in bfloat16 the small ones would each have been rounded away.
    assert total.item() == 1 + 2**-7 - 2**-10
    assert waiting.count == 0


def test_what_is_discarded_waits_no_more() -> None:
    ledger = Ledger()
    waiting = PartialGradients(ledger)
    waiting.add(torch.ones(4), owned=True)
    assert waiting.numel == 4
    waiting.discard()
    assert waiting.numel == ledger.pending_bytes == 0

"""The host cache on a GPU: page-locked, ordered by events, no copy that waits for compute."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fcdp.cache.tiers import HostTier
from fcdp.streams import Slice, Streams
from tests.fcdp.stand_ins import StandInUnit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@dataclass
class Made:
    streams: Streams
    tier: HostTier
    unit: Any
    #: Slices, whose memory would be given out anew while another stream reads it.
    slices: list[Slice] = field(default_factory=list)

    def filled(self, value: float) -> Slice:
        """A slice that the current stream fills."""
        rows = torch.empty((2, self.unit.shard_bytes // 4), device="cuda")
        made = Slice(rows, 0, self.streams.current())
        self.slices.append(made)
        rows.fill_(value)
        made.access.note_write(made.home)
        return made


def make(shard_bytes: int) -> Made:
    device = torch.device("cuda", 0)
    streams = Streams(device)
    unit: Any = StandInUnit("unit", shard_bytes)
    return Made(streams, HostTier([unit], streams, poison=True), unit)


def test_the_arena_is_page_locked() -> None:
    made = make(1 << 20)
    assert made.tier._areas[made.unit].rows.is_pinned()


def test_an_entry_is_read_after_its_copy_has_landed() -> None:
    """The copy out is held back by a long kernel; the copy in must wait for it by itself."""
    made = make(4 << 20)
    with torch.cuda.stream(made.streams.copies_out):
        torch.cuda._sleep(200_000_000)
    made.tier.store(made.unit, made.filled(3.0))
    loaded = made.filled(-1.0)
    made.tier.load(made.unit, loaded)
    torch.cuda.synchronize()
    assert (loaded.memory[1] == 3).all()
    assert (loaded.memory[0] == -1).all()


def test_an_entry_is_overwritten_after_its_last_read() -> None:
    made = make(4 << 20)
    made.tier.store(made.unit, made.filled(1.0))
    torch.cuda.synchronize()
    loaded = made.filled(0.0)
    loaded.home = torch.cuda.Stream()
    with torch.cuda.stream(loaded.home):
        torch.cuda._sleep(200_000_000)
    made.tier.load(made.unit, loaded)
    made.tier.store(made.unit, made.filled(2.0))
    torch.cuda.synchronize()
    assert (loaded.memory[1] == 1).all()


def test_storing_does_not_hold_up_the_current_stream() -> None:
    made = make(64 << 20)
    with torch.cuda.stream(made.streams.copies_out):
        torch.cuda._sleep(2_000_000_000)
    made.tier.store(made.unit, made.filled(1.0))
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not made.streams.copies_out.query(), "the copy had to wait, the current stream must not"
    torch.cuda.synchronize()


def test_an_entry_is_loaded_beside_what_runs() -> None:
    made = make(64 << 20)
    made.tier.store(made.unit, made.filled(5.0))
    loaded = made.filled(-1.0)
    torch.cuda.synchronize()
    loaded.home = made.streams.copies_in
    torch.cuda._sleep(2_000_000_000)  # the current stream is busy
    made.tier.load(made.unit, loaded)
    made.streams.copies_in.synchronize()  # and yet the copy ends
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert (loaded.memory[1] == 5).all()

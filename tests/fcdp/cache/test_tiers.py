"""Promises of every tier; the host arena beyond its plan; real files, and disks that fail."""

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcdp import direct_io
from fcdp.cache.tiers import DeviceTier, DiskTier, HostTier, TierUnavailable
from fcdp.streams import Slice, Streams
from tests.disks import full_disk
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.stand_ins import STREAMS, Place, StandInUnit, slice_of


def make(kind: str, units: list[Any], directory: Path) -> Any:
    if kind == "device":
        return DeviceTier(STREAMS)
    if kind == "host":
        return HostTier(units, STREAMS, poison=False)
    return DiskTier(units, STREAMS, directory=directory, buffers=2)


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
@settings(max_examples=25)
@given(
    numels=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    nodes=st.integers(2, 5),
    data=st.data(),
)
def test_what_is_stored_comes_back_and_the_own_row_is_left_alone(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    numels: list[int],
    nodes: int,
    data: st.DataObject,
) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    place = Place(nodes, node)
    units = [StandInUnit(str(at), 4 * numel, topology=place) for at, numel in enumerate(numels)]
    tier = make(kind, units, tmp_path_factory.getbasetemp())
    stored = [torch.randn(nodes, numel) for numel in numels]
    for _ in range(2):  # the second time overwrites
        for unit, shards in zip(units, stored, strict=True):
            tier.store(unit, slice_of(shards, node))
        order = data.draw(st.permutations(range(len(units))))
        expected = data.draw(st.lists(st.sampled_from(units), max_size=3))
        for unit in expected:
            if isinstance(tier, DiskTier):
                tier.expect(unit)
        for index in order:
            loaded = torch.full_like(stored[index], torch.nan)
            assert tier.intact(units[index])
            tier.load(units[index], slice_of(loaded, node))
            assert loaded[node].isnan().all()
            others = [other for other in range(nodes) if other != node]
            assert torch.equal(loaded[others], stored[index][others])
        stored = [2 * shards for shards in stored]
        for unit in units:
            tier.drop(unit)


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
def test_an_entry_holds_any_dtype_that_the_unit_gathers(tmp_path: Path, kind: str) -> None:
    odd: Any = StandInUnit("odd", 3)
    unit: Any = StandInUnit("unit", 6)
    tier = make(kind, [odd, unit], tmp_path)
    shards = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
    tier.store(unit, slice_of(shards))
    loaded = torch.zeros_like(shards)
    assert tier.intact(unit)
    tier.load(unit, slice_of(loaded))
    assert torch.equal(loaded[1], shards[1])


def test_a_full_device_is_asked_once_per_unit() -> None:
    """Each refusal empties the allocator's reserve and waits for the device."""
    full, unit = StandInUnit("full", 4), StandInUnit("other", 8)
    units: Any = full, unit
    tier = DeviceTier(STREAMS)
    refusing = mock.patch("torch.empty", side_effect=torch.OutOfMemoryError)
    with refusing as asked:
        for _ in range(3):
            with pytest.raises(TierUnavailable):
                tier.store(units[0], slice_of(torch.zeros(2, 1)))
    assert asked.call_count == 1
    tier.store(units[1], slice_of(torch.zeros(2, 2)))
    assert tier.nbytes == 8


def keeps_an_entry_on_a_device() -> None:
    """Streams are behind with memory that the allocator has back already."""
    device = torch.get_default_device()
    streams = Streams(device)
    tier = DeviceTier(streams)
    unit: Any = StandInUnit("unit", 8)
    for step in range(2):
        shards = Slice(torch.full((2, 2), step + 1.0), 0, streams.current())
        shards.access.note_write(streams.current())
        for stream in (streams.current(), streams.copies_in, streams.inter_node):
            with streams.on(stream):
                torch.empty(8, dtype=torch.uint8).fill_(7)
        tier.store(unit, shards)
        loaded = Slice(torch.zeros(2, 2), 0, streams.current())
        tier.load(unit, loaded)
        assert loaded.memory.tolist() == [[0.0, 0.0], [step + 1.0] * 2]
        tier.drop(unit)


def test_an_entry_of_the_device_has_memory_that_no_other_stream_uses(streams: OnStreams) -> None:
    streams.run(1, keeps_an_entry_on_a_device)


def host_tier(*planned: Any, poison: bool = False) -> HostTier:
    return HostTier(planned, STREAMS, poison=poison)


def test_a_unit_beyond_the_plan_takes_memory_of_its_own() -> None:
    planned, late = StandInUnit("planned", 8), StandInUnit("late", 8)
    tier = host_tier(planned)
    shards = torch.arange(4.0).view(2, 2)
    before = tier.nbytes
    tier.store(late, slice_of(shards))  # type: ignore[arg-type]
    loaded = torch.zeros_like(shards)
    tier.load(late, slice_of(loaded))  # type: ignore[arg-type]
    assert torch.equal(loaded[1], shards[1])
    assert tier.nbytes == before + 8


def test_a_unit_beyond_the_plan_and_beyond_memory_is_turned_away() -> None:
    tier = host_tier()
    unit: Any = StandInUnit("late", 8)
    with (
        mock.patch("fcdp.cache.memory.available_host_memory", return_value=7),
        pytest.raises(TierUnavailable, match="no 0.0 MiB free"),
    ):
        tier.store(unit, slice_of(torch.zeros(2, 2)))


def test_poison_shows_in_an_entry_that_was_dropped() -> None:
    unit: Any = StandInUnit("unit", 8)
    tier = host_tier(unit, poison=True)
    loaded = torch.zeros(2, 2)
    for _ in range(2):
        tier.load(unit, slice_of(loaded))
        assert loaded[1].isnan().all()
        tier.store(unit, slice_of(torch.ones(2, 2)))
        tier.load(unit, slice_of(loaded))
        assert (loaded[1] == 1).all()
        tier.drop(unit)


def disk_tier(directory: Path, *units: Any, buffers: int = 2) -> DiskTier:
    return DiskTier(units, STREAMS, directory=directory, buffers=buffers)


def entries(count: int) -> list[Any]:
    return [StandInUnit(f"unit{index}", 8192) for index in range(count)]


def full_of(value: float) -> Slice:
    return slice_of(torch.full((2, 2048), float(value)))


def holds(tier: Any, unit: Any, value: float) -> bool:
    """Whether the other node's row is there, and this value."""
    loaded = torch.zeros(2, 2048)
    assert tier.intact(unit)
    tier.load(unit, slice_of(loaded))
    return bool((loaded[1] == value).all())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back all writing to disk until it is set."""
    opened, write = threading.Event(), os.pwritev

    def hold(descriptor: int, *arguments: Any) -> int:
        assert opened.wait(60)
        os.fstat(descriptor)  # open as long as somebody writes to it
        return write(descriptor, *arguments)

    monkeypatch.setattr(os, "pwritev", hold)
    return opened


def test_nothing_is_left_in_the_directory_even_while_it_runs(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, *entries(1))
    assert list(tmp_path.iterdir()) == []
    descriptor = tier._file.descriptor
    os.fstat(descriptor)
    del tier
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_tier_goes_without_waiting_for_its_threads(tmp_path: Path, gate: threading.Event) -> None:
    """The garbage collector may end it in the middle of a thread's start, whose locks it needs."""
    units = entries(1)
    tier = disk_tier(tmp_path, *units)
    descriptor = tier._file.descriptor
    tier.store(units[0], full_of(1.0))
    threads = set(tier._threads._threads)
    goes = threading.Thread(target=gc.collect, daemon=True)
    tier._in_a_cycle = tier  # type: ignore[attr-defined]
    del tier
    goes.start()
    goes.join(10)
    assert not goes.is_alive()
    os.fstat(descriptor)
    gate.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_files_wait_for_what_the_device_does_with_the_memory(tmp_path: Path) -> None:
    """It fills what is written, and has read what is filled anew, by the time of the events."""
    memory, seen = torch.zeros(4096, dtype=torch.uint8), []

    class Filled:
        def synchronize(self) -> None:
            memory.fill_(7)

    class HasRead:
        def synchronize(self) -> None:
            seen.append(memory.clone())

    file = direct_io.File(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    total = direct_io.write(file, 0, memory, landed=[Filled()])
    assert memory.eq(7).all()
    memory.fill_(3)
    assert direct_io.read(file, 0, memory, landed=[HasRead()], expected=total) == total
    assert seen[0].eq(3).all()
    assert memory.eq(7).all()


def test_the_page_cache_is_bypassed(tmp_path: Path) -> None:
    import fcntl

    tier = disk_tier(tmp_path, *entries(1))
    assert fcntl.fcntl(tier._file.descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_an_unusable_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory = .*must exist and be writable"):
        disk_tier(tmp_path / "missing", *entries(1))


def test_a_full_disk_loses_the_entry_says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    units = entries(4)
    tier = disk_tier(tmp_path, *units)
    with full_disk(2 * 8192):
        for value, unit in enumerate(units):
            tier.store(unit, full_of(value))
        intact = [tier.intact(unit) for unit in units[:3]]
    assert intact == [True, True, False]
    assert len([r for r in caplog.records if "gathered across nodes again" in r.message]) == 1
    assert holds(tier, units[1], 1)
    # The disk has room again: the unit is stored as if nothing had been.
    tier.drop(units[2])
    tier.store(units[2], full_of(7.0))
    assert holds(tier, units[2], 7)


def test_a_failing_read_loses_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = entries(3)
    tier = disk_tier(tmp_path, *units, buffers=1)
    for unit in units:
        tier.store(unit, full_of(1.0))
    monkeypatch.setattr(os, "preadv", mock.Mock(side_effect=OSError(errno.EIO, "made up")))
    tier.expect(units[0])
    assert not tier.intact(units[0])
    assert not tier.intact(units[1])


def test_an_interrupted_wait_loses_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the host waits for the disk, caught: the transfer is waited for later."""
    units = entries(2)
    tier = disk_tier(tmp_path, *units, buffers=1)
    tier.store(units[0], full_of(3.0))
    transfer = tier._buffers[0].transfer
    interrupted = mock.patch.object(transfer, "result", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        tier.store(units[1], full_of(1.0))
    tier.store(units[1], full_of(1.0))
    assert holds(tier, units[0], 3)


def test_what_is_in_flight_is_bounded(tmp_path: Path, gate: threading.Event) -> None:
    """With two buffers a third store waits for the first write, and does not take memory."""
    units = entries(3)
    tier = disk_tier(tmp_path, *units)
    for unit in units[:2]:
        tier.store(unit, full_of(1.0))
    third = threading.Thread(target=tier.store, args=(units[2], full_of(1.0)))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.set()
    third.join(10)
    assert all(tier.intact(unit) for unit in units)
    assert tier.nbytes == 2 * 8192


@pytest.mark.parametrize("damage", ["cut", "filled with zeros", "one byte"])
def test_what_was_written_is_what_is_read_or_it_counts_as_lost(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process writes to the file during the job, past direct I/O."""
    units = entries(3)
    tier = disk_tier(tmp_path, *units, buffers=1)
    for value, unit in enumerate(units):
        tier.store(unit, full_of(value))
    assert tier.intact(units[0])
    offset = tier._offsets[units[1]]
    path = f"/proc/self/fd/{tier._file.descriptor}"
    with open(path, "r+b") as file:
        if damage == "cut":
            file.truncate(offset)
        elif damage == "filled with zeros":
            file.seek(offset)
            file.write(bytes(2 * 8192))
        else:
            file.seek(offset + 5)
            file.write(b"x")
    assert not tier.intact(units[1])
    assert [r for r in caplog.records if "gathered across nodes again" in r.message]

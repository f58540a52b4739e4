"""The disk tier: real files, and what happens when the disk fails."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fcdp import direct_io
from fcdp.cache.tiers.disk import DiskTier
from tests.disks import full_disk
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit, slice_of

PLACE: Any = Place(2, 0)


def make_tier(directory: Path, *units: Any, buffers: int = 2) -> DiskTier:
    return DiskTier(units, PLACE, CPU, STREAMS, directory, buffers=buffers)


def entries(count: int, numel: int = 2048) -> list[Any]:
    return [StandInUnit(f"unit{index}", 4 * numel) for index in range(count)]


def test_nothing_is_left_in_the_directory_even_while_it_runs(tmp_path: Path) -> None:
    tier = make_tier(tmp_path, *entries(1))
    assert list(tmp_path.iterdir()) == []
    descriptor = tier._file.descriptor
    os.fstat(descriptor)
    del tier
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_tier_goes_without_waiting_for_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may end it in the middle of a thread's start, whose locks it needs."""
    units = entries(1)
    tier = make_tier(tmp_path, *units)
    gate, write, written = threading.Event(), os.pwritev, threading.Event()
    descriptor = tier._file.descriptor

    def hold(*arguments: Any) -> int:
        assert gate.wait(60)
        os.fstat(descriptor)  # open as long as somebody writes to it
        written.set()
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", hold)
    tier.store(units[0], slice_of(torch.ones(2, 2048)))
    threads = set(tier._threads._threads)
    goes = threading.Thread(target=gc.collect, daemon=True)
    tier._in_a_cycle = tier  # type: ignore[attr-defined]
    del tier
    goes.start()
    goes.join(10)
    assert not goes.is_alive()
    assert not written.is_set()
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
    total = direct_io.write(file, 0, memory, [Filled()])
    assert memory.eq(7).all()
    memory.fill_(3)
    assert direct_io.read(file, 0, memory, [HasRead()], total) == total
    assert seen[0].eq(3).all()
    assert memory.eq(7).all()


def test_the_page_cache_is_bypassed(tmp_path: Path) -> None:
    import fcntl

    tier = make_tier(tmp_path, *entries(1))
    assert fcntl.fcntl(tier._file.descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_an_unusable_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory = .*must exist and be writable"):
        make_tier(tmp_path / "missing", *entries(1))


def test_a_full_disk_loses_the_entry_says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    units = entries(4)
    tier = make_tier(tmp_path, *units)
    with full_disk(2 * 8192):
        for value, unit in enumerate(units):
            tier.store(unit, slice_of(torch.full((2, 2048), float(value))))
        kept = [tier.intact(unit) for unit in units[:3]]
    assert kept == [True, True, False]
    assert len([r for r in caplog.records if "gathered across nodes again" in r.message]) == 1
    loaded = torch.zeros(2, 2048)
    assert tier.intact(units[1])
    tier.load(units[1], slice_of(loaded))
    assert (loaded[1] == 1).all()
    # The disk has room again: the unit is stored as if nothing had been.
    tier.drop(units[2])
    tier.store(units[2], slice_of(torch.full((2, 2048), 7.0)))
    assert tier.intact(units[2])


def test_a_failing_read_loses_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = entries(3)
    tier = make_tier(tmp_path, *units, buffers=1)
    for unit in units:
        tier.store(unit, slice_of(torch.ones(2, 2048)))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "made up")

    monkeypatch.setattr(os, "preadv", fail)
    tier.expect(units[0])
    assert not tier.intact(units[0])
    assert not tier.intact(units[1])


def test_an_interrupted_wait_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the host waits for the disk, caught: the transfer is waited for later."""
    units = entries(2)
    tier = make_tier(tmp_path, *units, buffers=1)
    tier.store(units[0], slice_of(torch.full((2, 2048), 3.0)))
    transfer = tier._buffers[0].transfer
    assert transfer is not None
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "result", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tier.store(units[1], slice_of(torch.ones(2, 2048)))
    tier.store(units[1], slice_of(torch.ones(2, 2048)))
    loaded = torch.zeros(2, 2048)
    assert tier.intact(units[0])
    tier.load(units[0], slice_of(loaded))
    assert (loaded[1] == 3).all()


def test_what_is_in_flight_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two buffers a third store waits for the first write, and does not take memory."""
    units = entries(3)
    tier = make_tier(tmp_path, *units)
    gate, write = threading.Event(), os.pwritev

    def hold(*arguments: Any) -> int:
        assert gate.wait(60)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", hold)
    for unit in units[:2]:
        tier.store(unit, slice_of(torch.ones(2, 2048)))
    third = threading.Thread(target=tier.store, args=(units[2], slice_of(torch.ones(2, 2048))))
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
    """Somebody else writes to the file under the job, behind direct I/O's back."""
    units = entries(3)
    tier = make_tier(tmp_path, *units, buffers=1)
    for value, unit in enumerate(units):
        tier.store(unit, slice_of(torch.full((2, 2048), float(value))))
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

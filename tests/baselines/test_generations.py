"""State in two generations: reads meanwhile, the state after a failure, refusals."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from baselines.generations import RECORD, STATE, Generations, Region
from fcdp import direct_io, durable
from fcdp.arena import Arena

pytestmark = pytest.mark.unit

SIZE = 4096
REGIONS = {"one": Region(SIZE), "still": Region(SIZE, changes=False), "other": Region(2 * SIZE)}


class _Training:
    """Regions all of whose bytes are the step's number."""

    def __init__(self, folder: Path, about: str = "a model") -> None:
        self.state = Generations(folder, "ssd", REGIONS, about=about, direct=False)
        self._memory = Arena(2 * SIZE, torch.device("cpu")).memory

    def write(self, step: int, *keys: str) -> None:
        for key in keys or [key for key in REGIONS if REGIONS[key].changes or step == 0]:
            memory = self._memory[: REGIONS[key].nbytes].fill_(step)
            place = self.state.room(key, step)
            self.state.note(key, direct_io.write(self.state.file, place, memory))

    def values(self, step: int) -> set[int]:
        values: set[int] = set()
        for key in ("one", "other"):
            place, expected = self.state.find(key, step)
            assert expected is not None
            memory = self._memory[: REGIONS[key].nbytes]
            direct_io.read(self.state.file, place, memory, expected=expected)
            values |= {*memory.unique().tolist()}
        return values


@pytest.fixture
def training(tmp_path: Path) -> Iterator[_Training]:
    """A training with steps 0 and 1 complete."""
    made = _Training(tmp_path)
    for step in (0, 1):
        made.write(step)
        made.state.commit(step)
    yield made
    made.state.close()


def _goes_on(folder: Path, step: int) -> None:
    again = _Training(folder)
    assert (again.state.step, again.values(step)) == (step, {step})
    again.state.close()


def test_what_is_read_is_what_was_written_last(training: _Training, tmp_path: Path) -> None:
    training.write(2)
    assert training.values(1) == {1}
    assert training.values(2) == {2}
    training.state.commit(2)
    training.write(3)
    assert training.values(2) == {2}
    training.state.close()
    _goes_on(tmp_path, 2)


def test_who_reads_waits_for_the_write_and_who_writes_for_the_step_before(
    training: _Training,
) -> None:
    with ThreadPoolExecutor(3) as threads:
        ahead = threads.submit(training.state.find, "one", 3)
        reading = threads.submit(training.state.find, "other", 2)
        writing = threads.submit(training.state.room, "one", 3)
        training.write(2, "one")
        assert not reading.done()
        training.write(2, "other")
        place, _ = reading.result(10)
        assert not writing.done()
        training.state.commit(2)
        assert not ahead.done(), "of the step before"
        training.write(3, "one")
        assert ahead.result(10)[0] == writing.result(10)
        assert writing.result(10) != training.state.find("one", 2)[0]
        assert place == training.state.find("other", 2)[0]


def test_nothing_is_written_after_a_record_that_failed(training: _Training, tmp_path: Path) -> None:
    """It may be there all the same, and then its step may not be overwritten."""
    training.write(2)
    replace = durable.replace

    def failing(path: Path, data: bytes) -> None:
        replace(path, data)
        raise OSError(errno.EIO, "the folder could not be flushed")

    with mock.patch.object(durable, "replace", failing), pytest.raises(OSError, match="flushed"):
        training.state.commit(2)
    assert json.loads((tmp_path / RECORD).read_text().split("\n")[0])["step"] == 2
    with pytest.raises(OSError, match="flushed"):
        training.write(3)
    training.state.close()
    _goes_on(tmp_path, 2)


def test_a_failure_is_raised_where_others_wait(training: _Training) -> None:
    with ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(training.state.find, "one", 2)
        with pytest.raises(RuntimeError, match="no more threads"), training.state.failing():
            raise RuntimeError("no more threads")
        assert isinstance(waiting.exception(10), RuntimeError)


def test_a_step_that_was_not_written_does_not_count(training: _Training, tmp_path: Path) -> None:
    training.write(2, "one")
    with pytest.raises(AssertionError, match="not written: 1"):
        training.state.commit(2)
    with pytest.raises(AssertionError, match="not written"):
        training.state.find("other", 2)
    training.state.close()
    _goes_on(tmp_path, 1)


def _in_the_step_before(folder: Path) -> None:
    record = folder / RECORD
    record.write_text(record.read_text().replace('"step": 1', '"step": 0'))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / STATE).unlink(), f"{STATE}: is missing, where a complete step"),
        (lambda folder: (folder / STATE).write_bytes(b"cut"), f"{STATE}: has 3 bytes, where a"),
        (lambda folder: (folder / RECORD).write_bytes(b"cut"), f"{RECORD}: damaged: has 3 bytes"),
        (_in_the_step_before, f"{RECORD}: damaged"),
    ],
)
def test_what_was_lost_or_cut_is_refused(
    harm: Callable[[Path], Any], message: str, training: _Training, tmp_path: Path
) -> None:
    training.state.close()
    harm(tmp_path)
    with pytest.raises(ValueError, match=message):
        _Training(tmp_path)


def test_a_folder_of_another_model_or_in_use_is_refused(
    training: _Training, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="ssd = .*: another process has it"):
        _Training(tmp_path)
    training.state.close()
    with pytest.raises(ValueError, match="about = 'a model': must be 'another', that of this"):
        _Training(tmp_path, "another")
    _goes_on(tmp_path, 1)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    expected = r"ssd = .*: 28 KiB are needed \(No space left on device\); nothing of what was there"
    fails = mock.patch("os.posix_fallocate", side_effect=full)
    with fails, pytest.raises(ValueError, match=expected):
        _Training(tmp_path)
    assert not any(tmp_path.iterdir())

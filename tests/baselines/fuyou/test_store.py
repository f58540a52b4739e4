"""What the store does when a write or a record fails while others wait for it, or come after it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn as nn

from baselines.fuyou.disk import Disk
from baselines.fuyou.layout import Group, Layout, laid_out
from baselines.fuyou.store import RECORD, Store
from fcdp import durable
from fcdp.cache.arena import Arena

pytestmark = pytest.mark.unit

BLOCKS = 2


class _Training:
    """A store of two groups, all of whose elements are the step's number."""

    def __init__(self, folder: Path) -> None:
        blocks = [nn.Linear(4, 4, bias=False) for _ in range(BLOCKS)]
        self.layout: Layout = laid_out(nn.Sequential(*blocks), blocks, torch.float32, aside=False)
        self.groups = self.layout.backward_order()
        self.disk = Disk()
        self.store = Store(folder, self.layout, self.disk)
        self._memory = Arena(max(g.nbytes for g in self.groups), torch.device("cpu")).memory

    def write(self, value: int, *, first: bool = False) -> None:
        for group in self.groups:
            self.write_group(group, value, first=first)

    def write_group(self, group: Group, value: int, *, first: bool = False) -> None:
        self.store.write(group, self._memory[: group.nbytes].fill_(value), first=first)

    def values(self) -> set[int]:
        found: set[int] = set()
        for group in self.groups:
            for read in self.store.read(group, ("master", "moments"), self._memory):
                read.result()
            found |= {*self._memory[: group.nbytes].unique().tolist()}
        return found

    def close(self) -> None:
        self.disk.close()
        self.store.close()


@pytest.fixture
def training(tmp_path: Path) -> _Training:
    """With steps 0 and 1 complete."""
    made = _Training(tmp_path)
    made.write(0, first=True)
    made.store.commit(0)
    made.write(1)
    made.store.commit(1)
    return made


def test_what_is_read_is_what_was_written_last(training: _Training, tmp_path: Path) -> None:
    training.write(2)
    assert training.values() == {1}
    training.store.end()
    assert training.values() == {2}
    training.store.commit(2)
    training.write(3)
    assert training.values() == {2}
    training.close()
    again = _Training(tmp_path)
    assert (again.store.step, again.values()) == (2, {2})
    again.close()


def _replaced_and_not_flushed(replace: Callable[[Path, str], None]) -> Callable[[Path, str], None]:
    def failing(path: Path, text: str) -> None:
        replace(path, text)
        raise OSError(errno.EIO, "the folder could not be flushed")

    return failing


def test_nothing_is_written_after_a_record_that_failed(training: _Training, tmp_path: Path) -> None:
    """It may be there all the same, and then its step may not be overwritten."""
    training.write(2)
    training.store.end()
    failing = _replaced_and_not_flushed(durable.replace)
    with mock.patch.object(durable, "replace", failing), pytest.raises(OSError, match="flushed"):
        training.store.commit(2)
    assert json.loads((tmp_path / RECORD).read_text().split("\n")[0])["step"] == 2
    with pytest.raises(OSError, match="flushed"):
        training.write(3)
    training.close()
    again = _Training(tmp_path)
    assert (again.store.step, again.values()) == (2, {2})
    again.close()


def test_who_waits_for_a_write_that_cannot_begin_is_told(training: _Training) -> None:
    training.write_group(training.groups[0], 2)
    training.store.end()
    with (
        ThreadPoolExecutor(1) as reader,
        mock.patch.object(training.disk, "write", side_effect=RuntimeError("no more threads")),
    ):
        waiting = reader.submit(training.values)
        with pytest.raises(RuntimeError, match="no more threads"):
            training.write_group(training.groups[1], 2)
        assert isinstance(waiting.exception(10), RuntimeError)
    training.close()


def test_who_waits_for_a_step_that_was_not_written_is_told(training: _Training) -> None:
    training.write_group(training.groups[0], 2)
    training.store.end()
    with pytest.raises(AssertionError, match="not written"):
        training.store.commit(2)
    with pytest.raises(AssertionError, match="not written"):
        training.values()
    training.close()

"""Host memory for optimizer state: groups are read ahead, and written behind.

Who may touch a buffer, and until when::

    free     nobody
    reading  the reader's thread, since the step began or the buffer became free
    taken    the optimizer's thread, since ``take``: it steps the group
    writing  the writer's thread, since the step of the group was acknowledged; then it is free

What is read is the state of the last step, of which nobody writes what is written already: so that
groups may be read as early as there is room, in forward already.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from baselines.fuyou.layout import Group
from baselines.fuyou.memory import Dram
from baselines.fuyou.store import Store


class Ring:
    """Buffers for a group each, which go around; groups come in an order that is known."""

    def __init__(self, store: Store, dram: Dram, groups: Sequence[Group]) -> None:
        """With one buffer, the least: each group is read when the one before is written."""
        self._store = store
        self._dram = dram
        self._groups = groups
        self._nbytes = max((group.nbytes for group in groups), default=0)
        self._buffers = [dram.take(self._nbytes, "optimizer state of a group")]
        self._free = list(self._buffers)
        self._coming: deque[Group] = deque()
        self._reading: deque[tuple[Group, torch.Tensor, Future[None]]] = deque()
        self._changed = threading.Condition()
        #: One thread: what is needed first is read first.
        self._reader = ThreadPoolExecutor(1, "fuyou-ahead")

    def deepen(self, most: int, spare: int) -> int:
        """Take buffers, up to so many in all, while so many bytes stay free; how many there are.

        Between steps, of which the last may still be written.
        """
        while len(self._buffers) < min(most, len(self._groups)):
            if self._dram.free - self._nbytes < spare:
                break
            taken = self._dram.try_take(self._nbytes)
            if taken is None:
                break
            self._buffers.append(taken)
            with self._changed:
                self._free.append(taken)
        return len(self._buffers)

    def idle(self) -> torch.Tensor:
        """A buffer that nothing uses between steps."""
        return self._buffers[0]

    def begin(self) -> None:
        """Begin to read all groups, as far as there are buffers."""
        with self._changed:
            assert not self._coming, "a step has ended"
            assert not self._reading, "a step has ended"
            self._coming.extend(self._groups)
            self._fill()

    def take(self, group: Group) -> torch.Tensor:
        """A buffer with the state of a group, the next one; waits until it has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._reading)
            coming, buffer, read = self._reading.popleft()
        assert coming is group, "groups come in backward order"
        read.result()
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let a buffer be read into; for what was taken, whether it was written or not."""
        with self._changed:
            self._free.append(buffer)
            self._fill()
            self._changed.notify()

    def close(self) -> None:
        """End the thread when what it has in hand has ended."""
        self._reader.shutdown()

    def _fill(self) -> None:
        while self._free and self._coming:
            group, buffer = self._coming.popleft(), self._free.pop()
            read = self._reader.submit(self._read, group, buffer)
            self._reading.append((group, buffer, read))

    def _read(self, group: Group, buffer: torch.Tensor) -> None:
        for read in self._store.read(group, ("master", "moments"), buffer):
            read.result()

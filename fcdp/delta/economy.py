"""When differences pay: what coding takes against what the link takes for the bytes it saves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from fcdp.codec import When
from fcdp.exchange import Pending, wait_all

#: Smaller exchanges tell of the link's latency, not of its rate.
_LEAST_BYTES = 2**16
#: Weight of the last observation: a few steps forget what was.
_WEIGHT = 0.25


class Mean:
    """A running mean that forgets; ``None`` before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class Economy:
    """What one rank knows of its link and of its own speed.

    Each rank decides for its own shards, and what it sends says how it is to be read: ranks need
    not decide alike. The link's rate is that of the exchanges that somebody had to wait for. One
    that ended unnoticed, behind computation, says nothing; as long as all of them do, every shard
    is sent whole.
    """

    def __init__(self, when: When) -> None:
        self._when = when
        #: Seconds per byte that arrives: of exchanges that were waited for.
        self._link = Mean()
        #: Seconds per byte of a shard: to tell a difference, and to apply one.
        self.told, self.applied = Mean(), Mean()

    def pays(self, shard_bytes: int, ratio: float, others: int) -> bool:
        """Whether to tell a difference of ``ratio`` times ``shard_bytes`` to ``others`` nodes."""
        if self._when == "always":
            return True
        if self._link.value is None:
            return False
        coding = (self.told.value or 0.0) + others * (self.applied.value or 0.0)
        return coding < others * (1 - ratio) * self._link.value

    def watched(self, works: Sequence[dist.Work], nbytes: int) -> Sequence[Pending]:
        """An exchange, begun now, that brings about ``nbytes``: its end is looked at."""
        return [_Watched(works, nbytes, self._link)]


class _Watched:
    def __init__(self, works: Sequence[dist.Work], nbytes: int, link: Mean) -> None:
        self._works, self._nbytes, self._link = works, nbytes, link
        self._begun = time.perf_counter()

    def wait(self) -> None:
        unnoticed = all(work.is_completed() for work in self._works)
        wait_all(self._works)
        if not unnoticed and self._nbytes >= _LEAST_BYTES:
            self._link.add((time.perf_counter() - self._begun) / self._nbytes)

"""When differences pay: what coding takes against the waiting for bytes that it saves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from fcdp.codec import When
from fcdp.exchange import Pending, wait_all

#: Weight of the last observation: a few steps forget what was.
_WEIGHT = 0.25
#: Smaller exchanges tell of the link's latency, not of its rate.
_LEAST_BYTES = 2**16
#: Exchanges of whole shards that are remembered, and how many there must be.
_REMEMBERED, _ENOUGH = 8, 2


class Mean:
    """A running mean that forgets; ``None`` before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class Watch:
    """An exchange, and the seconds that somebody waited for it."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works
        self.waited = 0.0

    def wait(self) -> None:
        begun = time.perf_counter()
        wait_all(self._works)
        self.waited = time.perf_counter() - begun


class Economy:
    """What one rank knows of its waits and of its own speed.

    Each rank decides for its own shards, and what it sends says how it is to be read: ranks need
    not decide alike. What counts is not the link's rate but the time that was waited for whole
    shards: as long as computation hides their exchanges, nothing is to be saved. Of the last ones
    the shortest wait counts, as a long one may have been for a rank that came late.
    """

    def __init__(self, when: When) -> None:
        self._when = when
        #: Seconds waited per byte that arrived, of the last exchanges of whole shards.
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        #: Seconds per byte of a shard: to tell a difference, and to apply one.
        self.told, self.applied = Mean(), Mean()
        #: To tell one with entropy codes; applying them takes about as long.
        self.finer = Mean()

    def saw_whole(self, waited: float, nbytes: int) -> None:
        """Note how long ``nbytes`` of whole shards were waited for, in seconds."""
        if nbytes >= _LEAST_BYTES:
            self._waits.append(waited / nbytes)

    def pays(self, ratio: float, others: int) -> bool:
        """Whether to tell ``others`` nodes a difference of ``ratio`` times the shard's bytes."""
        if self._when != "pays":
            return True
        if len(self._waits) < _ENOUGH:
            return False
        coding = (self.told.value or 0.0) + others * (self.applied.value or 0.0)
        return coding < others * (1 - ratio) * min(self._waits)

    def finer_pays(self, ratio: float, finer: float, others: int) -> bool:
        """Whether to tell it with entropy codes, in ``finer`` times the shard's bytes."""
        if self._when != "pays":
            return self._when == "smallest"
        coding = (self.finer.value or 0.0) - (self.told.value or 0.0)
        return coding < others * (ratio - finer) * min(self._waits)

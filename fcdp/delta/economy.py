"""The decision when differences pay: coding time against the waiting that it saves."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

from fcdp.exchange import Pending, wait_all

#: When a rank sends what is coded: see ``fcdp.Delta``.
When = Literal["pays", "always", "smallest"]
#: Weight of the last observation: a few steps outweigh the past.
_WEIGHT = 0.25
#: Smaller exchanges show the link's latency, not its rate.
_LEAST_BYTES = 2**16
#: Exchanges of whole shards that are remembered, and how many there must be.
_REMEMBERED, _ENOUGH = 8, 2
#: A link that carries what is coded in less than this part of the usual time has become faster.
_FASTER = 0.5


class Mean:
    """A running mean that forgets; ``None`` before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class Watch:
    """An exchange under way, the seconds spent waiting for it, and those that it took."""

    def __init__(self, works: Sequence[Pending]) -> None:
        self._works = works
        self._begun = time.perf_counter()
        self.waited = self.took = 0.0

    def wait(self) -> None:
        begun = time.perf_counter()
        wait_all(self._works)
        ended = time.perf_counter()
        self.waited, self.took = ended - begun, ended - self._begun


class Economy:
    """One rank's measurements of its waits and of its speed of coding.

    Each rank decides for its own shards, and its messages say how to read them: ranks need not
    decide alike. Not the link's rate counts but the time that was waited for whole shards: as long
    as computation hides their exchanges, nothing is to be saved. Of the last waits the shortest
    counts, as a long one may have been for a rank that came late.
    """

    def __init__(self, when: When) -> None:
        self._when = when
        #: Seconds waited per byte that arrived, of the last exchanges of whole shards.
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        #: Seconds per byte of a shard that the last coded exchanges took; and the least of the
        #: first ones since the link was learned.
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._usual: float | None = None
        #: Seconds per byte of a shard: to encode a difference, and to apply one.
        self.encoding, self.applied = Mean(), Mean()
        #: To encode one with entropy codes; applying it takes about as long.
        self.finer = Mean()

    def saw_whole(self, waited: float, nbytes: int) -> None:
        """Note how long ``nbytes`` of whole shards were waited for, in seconds."""
        if nbytes >= _LEAST_BYTES:
            self._waits.append(waited / nbytes)

    def saw_coded(self, took: float, nbytes: int) -> None:
        """Note how long a coded exchange took, in seconds, of shards of so many bytes."""
        self._took.append(took / max(1, nbytes))
        if self._usual is None and len(self._took) == _REMEMBERED:
            self._usual = min(self._took)

    @property
    def faster(self) -> bool:
        """Whether the link has become so much faster that it has to be learned anew."""
        return self._usual is not None and max(self._took) < _FASTER * self._usual

    def measure_again(self) -> None:
        """Send shards whole until the link is known: all ranks at once, or nobody learns."""
        self._waits.clear()
        self._took.clear()
        self._usual = None

    def pays(self, ratio: float, others: int) -> bool:
        """Whether to send ``others`` nodes a difference of ``ratio`` times the shard's bytes."""
        if self._when != "pays":
            return True
        if len(self._waits) < _ENOUGH:
            return False
        coding = (self.encoding.value or 0.0) + others * (self.applied.value or 0.0)
        return coding < others * (1 - ratio) * min(self._waits)

    def finer_pays(self, ratio: float, finer: float, others: int) -> bool:
        """Whether to encode it with entropy codes, in ``finer`` times the shard's bytes."""
        if self._when != "pays":
            return self._when == "smallest"
        coding = (self.finer.value or 0.0) - (self.encoding.value or 0.0)
        return coding < others * (ratio - finer) * min(self._waits)

"""The order in which a step gathers its units: known, once one step has run."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp.unit import Unit


class Schedule:
    """Predicts from the pass before. A pass starts with a forward of the model and holds what
    follows it: forward 1…L, backward L…1, recomputations wherever checkpointing puts them."""

    def __init__(self) -> None:
        self._before: list[Unit] = []
        self._now: list[Unit] = []

    def begin(self) -> None:
        if self._now:
            self._before, self._now = self._now, []

    def follow(self, unit: Unit, depth: int) -> Sequence[Unit]:
        """Note the gather of ``unit``; return up to ``depth`` units that come next.

        Nothing, if the pass before had another unit in this place: the model took another path.
        """
        place = len(self._now)
        self._now.append(unit)
        if place >= len(self._before) or self._before[place] is not unit:
            return []
        return self._before[place + 1 : place + 1 + depth]

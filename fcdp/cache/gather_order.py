"""The order in which a pass gathers its units: known, once one pass of its kind has run."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp.cache.entry import Entry


class GatherOrder:
    """Predicts from the pass before. A pass starts with a forward of the model and holds what
    follows it: forward 1…L, backward L…1, recomputations wherever checkpointing puts them.

    Passes with gradients and without are told apart, so that an evaluation between two steps does
    not make the first step after it unknown.
    """

    def __init__(self) -> None:
        self._with_gradients = False
        self._before: dict[bool, list[Entry]] = {False: [], True: []}
        self._now: list[Entry] = []

    def begin(self, with_gradients: bool) -> None:
        """Begin a pass; what was noted since the last call was one, if it was anything."""
        if self._now:
            self._before[self._with_gradients], self._now = self._now, []
        self._with_gradients = with_gradients

    def follow(self, entry: Entry, depth: int) -> Sequence[Entry]:
        """Note the gather of a unit; return the entries of up to ``depth`` that come next.

        Nothing, if the pass before had another unit in this place: the model took another path.
        """
        place, before = len(self._now), self._before[self._with_gradients]
        self._now.append(entry)
        if place >= len(before) or before[place] is not entry:
            return []
        return before[place + 1 : place + 1 + depth]

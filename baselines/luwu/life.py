"""Signs of life between roles: who is silent for too long has ended, or hangs."""

from __future__ import annotations

import time
from collections.abc import Iterable

#: Seconds between two signs of life, ...
BEAT_S = 1.0
#: ... without any, until a role is given up, ...
PATIENCE_S = 30.0
#: ... and until all roles have met.
MEETING_S = 300.0


class Lost(ConnectionError):
    """A role that the run cannot go on without is gone."""


class Lives:
    """When this role has last heard from its neighbours, and when it has to be heard itself."""

    def __init__(self, names: Iterable[str], patience_s: float) -> None:
        self._patience_s = patience_s
        self._begun = time.monotonic()
        self._heard: dict[str, float | None] = dict.fromkeys(names)
        self._beat = 0.0

    def hear(self, name: str) -> None:
        """Note a sign of life of a neighbour; of others nothing is expected."""
        if name in self._heard:
            self._heard[name] = time.monotonic()

    def forget(self, name: str) -> None:
        """Expect nothing more of a neighbour."""
        self._heard.pop(name, None)

    def is_due(self) -> bool:
        """Whether it is time to be heard again."""
        now = time.monotonic()
        if now - self._beat < BEAT_S:
            return False
        self._beat = now
        return True

    def check(self) -> None:
        """Raises ``Lost`` if a neighbour has been silent for too long."""
        now = time.monotonic()
        for name, heard in self._heard.items():
            if heard is None and now - self._begun > MEETING_S:
                raise Lost(f"{name} did not come within {MEETING_S:g} s")
            if heard is not None and now - heard > self._patience_s:
                raise Lost(
                    f"{name} has not been heard of for {self._patience_s:g} s: it has ended, or "
                    "hangs"
                )

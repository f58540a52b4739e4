"""What ranks leave for each other to read, in the process group's store."""

from __future__ import annotations

import json
import os
import time
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, TCPStore, _get_default_store

_READ = "read"


class Announcement(NamedTuple):
    """What one rank tells of its failure."""

    text: str
    #: Exchanges of the pass that the failed rank completed; of several failed ranks, the fewest.
    exchanges: int


class Board:
    """Announcements of a set of ranks; whatever it does raises where the store is lost."""

    def __init__(self, name: str) -> None:
        self._name = f"fcdp/failures/{name}"
        self._opened: Any = None

    def put(self, key: str, announced: Announcement) -> str:
        """Keep the first text and the fewest exchanges under ``key``; returns that text."""
        value = self._store.compare_set(key, "", json.dumps(announced))
        while (there := Announcement(*json.loads(value))).exchanges > announced.exchanges:
            lower = json.dumps(there._replace(exchanges=announced.exchanges))
            value = self._store.compare_set(key, value.decode(), lower)
        return there.text

    def read(self, key: str) -> Announcement | None:
        """What is announced under ``key``; never waits for it."""
        if not self._store.check([key]):
            return None
        return Announcement(*json.loads(self._store.get(key)))

    def acknowledge(self) -> None:
        """Note that this rank needs to read nothing more."""
        self._store.add(_READ, 1)

    def linger(self, ranks: int, seconds: float) -> None:
        """Give ``ranks`` up to ``seconds`` to read, if the store ends with this process."""
        if dist.get_rank() != 0 or not _served_by_a_rank():
            return
        until = time.monotonic() + seconds
        while self._store.add(_READ, 0) < ranks and time.monotonic() < until:
            time.sleep(0.1)

    @property
    def _store(self) -> Any:
        if self._opened is None:
            # A connection of its own: another thread may block for minutes on the first one.
            self._opened = PrefixStore(self._name, _get_default_store().clone())
        return self._opened


def _served_by_a_rank() -> bool:
    """Whether the default store ends with rank 0's process."""
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, TCPStore) and not agent

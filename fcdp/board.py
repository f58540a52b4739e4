"""What ranks leave for each other to read, in the process group's store."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

_TIMEOUT = timedelta(seconds=20)


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

    def sign(self, key: str) -> None:
        """Count this rank under ``key``; once per rank."""
        self._store.add(f"{key}/signed", 1)

    def signed(self, key: str) -> int:
        """How many ranks have signed ``key``."""
        return int(self._store.add(f"{key}/signed", 0))

    def write(self, key: str, number: int) -> None:
        self._store.set(f"{key}/number", str(number))

    def number(self, key: str) -> int | None:
        """What was written last under ``key``."""
        key = f"{key}/number"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def open(self) -> None:
        """Connect to the store. Later may be too late: a lost one is called for minutes."""
        assert self._store is not None

    @property
    def _store(self) -> Any:
        if self._opened is None:
            # A connection of its own: another thread may block for minutes on the first one.
            store: Any = _get_default_store()
            store = store.clone()
            store.set_timeout(_TIMEOUT)
            self._opened = PrefixStore(self._name, store)
        return self._opened


def served_here() -> bool:
    """Whether the default store ends with this process."""
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Files and memory have no server.
    return dist.get_rank() == 0 and hasattr(store, "port") and not by_torchrun

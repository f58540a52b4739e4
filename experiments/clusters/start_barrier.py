"""The start barrier: ranks set up on the open link, wait, and train on the limited one.

Building a model distributes it, some strategies several times over, which on a slow link would
take longer than the steps that are measured. So the link is limited when all ranks are ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_READY = "ready"
_OPEN = "open"
_POLL_S = 0.01


def wait(directory: Path) -> None:
    """Say, on rank 0, that all ranks have set up, and wait until the link is limited.

    Raises ``RuntimeError`` if it could not be.
    """
    (directory / _READY).touch()
    while not (directory / _OPEN).exists():
        time.sleep(_POLL_S)
    if error := (directory / _OPEN).read_text(encoding="utf-8"):
        raise RuntimeError(f"the link between nodes could not be limited: {error}")


class StartBarrier:
    """The runner's side: calls ``limit`` when a launch's ranks are ready, and lets them go on.

    ``directory`` is one that the launch's rank 0 shares. What ``limit`` raises goes to that rank.
    """

    def __init__(self, directory: Path, limit: Callable[[], dict[str, Any]]) -> None:
        self._directory = directory
        self._limit = limit
        self._ranks_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="start-barrier", daemon=True)
        #: Limit that was set; empty if the ranks never got that far.
        self.network: dict[str, Any] = {}

    def __enter__(self) -> StartBarrier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks_ended.set()
        self._thread.join()
        for name in (_READY, _OPEN):
            (self._directory / name).unlink(missing_ok=True)

    def _watch(self) -> None:
        while not (self._directory / _READY).exists():
            if self._ranks_ended.wait(_POLL_S):
                return
        message = ""
        try:
            self.network = self._limit()
        except Exception as error:
            message = str(error) or type(error).__name__
        # In one piece, so that the rank cannot read half a message.
        draft = self._directory / f"{_OPEN}.draft"
        draft.write_text(message, encoding="utf-8")
        draft.replace(self._directory / _OPEN)

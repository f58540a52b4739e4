"""The start barrier: ranks set up on the open link, wait, and train on the limited one.

Building a model distributes it, some strategies several times over, which on a slow link would
take longer than the steps that are measured. So the link is limited when all ranks are ready.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def limiting(directory: Path, limit: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Call ``limit`` when the ranks of a launch inside are ready, and let them go on.

    ``directory`` is one that the launch's rank 0 shares. What ``limit`` raises goes to that rank.
    Yields the limit, filled in once it is set: it stays empty if ranks never get that far.
    """
    network: dict[str, Any] = {}
    ranks_ended = threading.Event()

    def watch() -> None:
        while not (directory / _READY).exists():
            if ranks_ended.wait(_POLL_S):
                return
        message = ""
        try:
            network.update(limit())
        except Exception as error:
            message = str(error) or type(error).__name__
        # In one piece, so that the rank cannot read half a message.
        draft = directory / f"{_OPEN}.draft"
        draft.write_text(message, encoding="utf-8")
        draft.replace(directory / _OPEN)

    thread = threading.Thread(target=watch, name="start-barrier", daemon=True)
    thread.start()
    try:
        yield network
    finally:
        ranks_ended.set()
        thread.join()
        for name in (_READY, _OPEN):
            (directory / name).unlink(missing_ok=True)

"""One thread per process that looks after waits, and the hook that sees the process end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import Any, Protocol

#: Seconds between two looks; a wait that takes two of them is a long one.
POLL_S = 1.0


class Watched(Protocol):
    """What the thread looks after."""

    def look(self) -> None: ...

    def announce(self, error: BaseException, *, final: bool = False) -> None: ...

    def linger(self) -> None: ...


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None
_previous_hook: Any = None
_process = 0


def watch(failures: Watched) -> None:
    """Have the process's one thread look after ``failures``; the thread ends after the last."""
    global _thread, _previous_hook, _process
    with _lock:
        _watched.add(failures)
        if _thread is None:
            _thread = threading.Thread(target=_keep_looking, name="fcdp failures", daemon=True)
            _thread.start()
        if _previous_hook is None:
            _process = os.getpid()
            _previous_hook, sys.excepthook = sys.excepthook, _announce_final
            atexit.register(_stop_looking)


def _keep_looking() -> None:
    global _thread
    while not _stop.wait(POLL_S):
        _look_once()
        with _lock:
            if not _watched:
                _thread = None
                return


def _look_once() -> None:
    with _lock:
        watched = list(_watched)
    for failures in watched:
        failures.look()


def _stop_looking() -> None:
    """End the thread before the interpreter: inside of the store's code it could not be."""
    _stop.set()
    looking = _thread  # which the thread forgets when it ends by itself
    if looking is not None:
        looking.join(timeout=POLL_S)


def _announce_final(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Announce an error that nobody caught, wherever in this process's main thread."""
    watched = list(_watched) if os.getpid() == _process else []  # not in a fork
    for failures in watched:
        failures.announce(error, final=True)
    _previous_hook(kind, error, trace)
    if isinstance(error, Exception):  # a user who interrupts is not kept waiting
        for failures in watched:
            failures.linger()

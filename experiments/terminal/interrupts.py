"""Interrupts: Ctrl-C and SIGTERM end a command alike, but not while it tidies up."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

#: Exit status of a command that was interrupted.
INTERRUPTED = 130


def raise_them() -> None:
    """Have the first interrupt raise ``KeyboardInterrupt``, and ignore what follows."""
    _on_signals(_interrupt)
    _spare_forks()


@functools.cache
def _spare_forks() -> None:
    """Spare forked processes: a library's helper that SIGTERM ends must not end our cluster."""
    os.register_at_fork(after_in_child=lambda: _on_signals(signal.SIG_DFL))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


def _on_signals(action: Callable[[int, FrameType | None], NoReturn] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)

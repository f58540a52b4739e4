"""No process outlives the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection, parent_process

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, the process that forked it, ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the request: then nobody sends the signal any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher(end_others: Callable[[], None]) -> None:
    """Call ``end_others`` and kill this process when the one that called ``Process.start`` ends.

    With the fork server that one is not the parent, so the kernel's signal does not tell; the
    fork server itself lives as long as any of its children.
    """
    launcher = parent_process()
    if launcher is None:
        raise RuntimeError("only a process that multiprocessing started has a launcher")
    sentinel = launcher.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        try:
            end_others()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()

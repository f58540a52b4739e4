"""The module that the fork server imports when it starts: it pays for the heavy imports once.

multiprocessing skips a preloaded module that does not import; here the reason is kept.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import traceback

#: The environment variable with the JSON list of modules.
MODULES_VARIABLE = "FCDP_PRELOAD"

#: Pid of the fork server, the parent of every process that it forks.
SERVER = os.getpid()

#: Traceback of each module that could not be imported.
FAILURES: dict[str, str] = {}


def import_modules(modules: list[str]) -> None:
    """Import modules; tracebacks of those that fail are in ``FAILURES``.

    The garbage collector of processes forked from this one leaves what is there now alone: it
    would write to every page of it, and each write copies the page.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            FAILURES[module] = traceback.format_exc()
    gc.collect()
    gc.freeze()


import_modules(json.loads(os.environ.get(MODULES_VARIABLE, "[]")))

"""The fork server: one process that has imported everything, and forks the rest.

It belongs to the calling process, not to one cluster: a second cluster finds it warm. It ends
with the calling process. It imports this module when it starts, which pays for the heavy imports
once. multiprocessing silently skips a module that cannot be imported: here the reason is kept.
"""

import gc
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from experiments.clusters import lifetimes
from experiments.clusters.interface import ClusterError
from experiments.records.environment import named, passed_on

#: The environment variable with the JSON list of modules.
_MODULES_VARIABLE = "FCDP_PRELOAD"
#: A socket's path has at most 107 bytes; this many are left beside our folder's name and
#: "/pymp-xxxxxxxx/listener-xxxxxxxx", which multiprocessing adds.
_LONGEST_PARENT = 27
#: Pid of the fork server, the parent of every process that it forks.
_SERVER = os.getpid()
#: Traceback of each module that could not be imported.
_FAILURES: dict[str, str] = {}


def start(modules: Sequence[str]) -> ForkServerContext:
    """Start the fork server if there is none, and check that ``modules`` can be imported.

    Modules that an earlier caller did not name are imported again by every node's agent: a later
    cluster with other modules works, but slower. Libraries that read variables while they are
    imported see the present ones. Raises ``ClusterError`` with the traceback of the first module
    that cannot be imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    variables = {
        _MODULES_VARIABLE: json.dumps(list(modules)),
        # The fork server starts with an interpreter's default path, not with this process's.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # OpenMP reads it once, when torch is imported.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Emulated nodes reach no hub, which transformers would ask for long.
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        # A library that asks for GPUs while it is imported must not start the CUDA runtime, which
        # no forked process could use any more.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    _own_sockets()
    before = dict(os.environ)
    try:
        # The kernel shows a forked process's environment as the fork server started with it.
        os.environ.clear()
        os.environ.update(passed_on(before, named(before)) | variables)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    _check(context, list(modules))
    return context


@cache
def _own_sockets() -> None:
    """Put multiprocessing's folder of sockets into one whose name says who owns it.

    multiprocessing removes its folder when this process ends, but not if this process is killed:
    then a later cluster's process does.
    """
    lifetimes.remove_stale()
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        parent = lifetimes.USUAL
    folder = tempfile.mkdtemp(prefix=f"{lifetimes.new_prefix()}-", dir=parent)
    # After multiprocessing has removed its own folder, which it does with the priority -100.
    util.Finalize(
        None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-101
    )
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        util.get_temp_dir()  # It remembers the first answer.
    finally:
        tempfile.tempdir = before


def _check(context: ForkServerContext, modules: list[str]) -> None:
    """Raise ``ClusterError`` if a child of the fork server cannot import the modules."""
    receiver, sender = context.Pipe(duplex=False)
    with receiver:
        process = context.Process(target=_send_failures, args=(modules, sender))
        try:
            process.start()
            sender.close()
            ours, failures = receiver.recv()
        except (EOFError, OSError) as error:
            raise ClusterError(
                f"the fork server ended while importing {', '.join(modules)}: {error!r}; "
                "its standard error says why"
            ) from error
        process.join()
    if not ours:
        raise ClusterError(
            "this process already runs a fork server that has not imported the modules to "
            "preload: enter the cluster before anything else uses multiprocessing's fork server"
        )
    for module, reason in failures.items():
        raise ClusterError(f"cannot import {module}, a module to preload:\n{reason}")


def _send_failures(modules: list[str], sender: Connection) -> None:
    ours = os.getppid() == _SERVER
    import_modules([name for name in modules if name not in _FAILURES])
    failures = {name: _FAILURES[name] for name in modules if name in _FAILURES}
    sender.send((ours, failures))


def import_modules(modules: list[str]) -> None:
    """Import modules; tracebacks of those that fail are in ``_FAILURES``.

    In processes forked from this one, garbage collection skips all objects that exist now: it
    would write to each of their pages, and so copy it.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            _FAILURES[module] = traceback.format_exc()
    gc.collect()
    gc.freeze()


import_modules(json.loads(os.environ.get(_MODULES_VARIABLE, "[]")))

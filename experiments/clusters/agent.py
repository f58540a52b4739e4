"""The agent of one node, which forks its ranks as torchrun would; each runs the launch's function.

An emulated node's is forked from a process that has imported everything, and enters the node's
namespace.
"""

import io
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from pkgutil import resolve_name

import torch
from pyroute2 import netns
from torch._C._distributed_c10d import TCPStore

from experiments.clusters import lifetimes, preload
from experiments.clusters.causes import Board, Exit, NodeResult
from experiments.clusters.interface import Launch
from experiments.clusters.launch import Machine, Node

#: Seconds between two looks at the ranks, and for those of a node to end by themselves after the
#: first failure.
_LOOK_S, _GRACE_S = 0.05, 1.0


def serve(node: Node, launch: Launch, board: Board, parent: Connection) -> None:
    """Run the ranks of one node in this fresh process and send their ``NodeResult``."""
    me = frozenset({os.getpid()})
    _begin(launch.logs / f"node{node.node}.log", lambda: node.end_processes(me))
    with suppress(BrokenPipeError):  # the parent has given up meanwhile
        try:
            _settle(node)
            store: TCPStore | None = None
            if node.node == 0:
                # All ranks meet here, at this address only: a store that rank 0 opens would listen
                # on every interface of the node, and it authenticates nobody.
                listener = socket.create_server((node.master_address, node.port))
                store = TCPStore(
                    node.master_address,
                    node.port,
                    is_master=True,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=listener.detach(),
                )
            parent.send(_launched(node, launch, board))
            # Other nodes may still use the store: until the parent, who closes its end, has heard
            # from all of them.
            parent.poll(None)
            del store
        except Exception:
            error = f"the agent of node {node.node} failed:\n{traceback.format_exc()}"
            parent.send(NodeResult(error=error))


def serve_beside(machine: Machine, entry: str, log: Path, parent: Connection) -> None:
    """Call the function of a process beside the ranks; send how it ended."""
    _begin(log, lambda: None)
    error = None
    try:
        _settle(machine)
        resolve_name(entry)()
    except BaseException:
        error = f"{log.stem}: {traceback.format_exc()}"
        traceback.print_exc()
    with suppress(BrokenPipeError):
        parent.send(NodeResult(error=error))


def _begin(log: Path, end_others: Callable[[], None]) -> None:
    # A group of its own: the terminal's Ctrl-C reaches the parent only, which ends the ranks.
    os.setsid()
    lifetimes.die_with(os.getppid())
    lifetimes.die_with_launcher(end_others)
    _write_to(log)


def _settle(machine: Machine) -> None:
    """Move this process to its machine, and take on its environment and modules."""
    if machine.cores:  # before ranks and threads start, which inherit it
        os.sched_setaffinity(0, machine.cores)
    os.environ.clear()
    os.environ.update(machine.environment)
    # Temporary files of the machine's processes lie apart from others, and end with the launch.
    os.mkdir(machine.scratch)
    os.environ["TMPDIR"] = machine.scratch
    tempfile.tempdir = None  # A module imported before may have asked for the directory already.
    if machine.namespace is not None:
        netns.setns(machine.namespace, flags=0)
    _search_first(machine.environment.get("PYTHONPATH", "").split(os.pathsep))
    preload.import_modules(list(machine.preload))


def _search_first(folders: Sequence[str]) -> None:
    """Import from these folders before all others, as an interpreter that starts with them does.

    Raises ``RuntimeError`` where a module that they have was preloaded from elsewhere.
    """
    new = [path for path in map(os.path.abspath, filter(None, folders)) if path not in sys.path]
    late = [name for name in sys.modules if "." not in name and PathFinder.find_spec(name, new)]
    if late:
        raise RuntimeError(f"{', '.join(late)}: preloaded, so not imported from {', '.join(new)}")
    sys.path[:0] = new


def _launched(node: Node, launch: Launch, board: Board) -> NodeResult:
    """Fork the ranks of the node and wait for them; return how they ended.

    Ranks of a failed node have a moment to end by themselves: the one that failed first may
    not have reported it yet.
    """
    context = get_context("fork")
    returned = context.Barrier(node.ranks_per_node)
    running: dict[int, ForkProcess] = {}
    for local in range(node.ranks_per_node):
        rank = node.node * node.ranks_per_node + local
        arguments = launch, board, _variables(node, local, rank), returned, os.getpid()
        running[rank] = context.Process(target=_run, args=arguments)
        running[rank].start()
    exits: dict[int, Exit] = {}
    ends = float("inf")
    while running and time.monotonic() < ends:
        # A sentinel is not enough: a process that the rank has started may hold it open.
        wait([process.sentinel for process in running.values()], _LOOK_S)
        for rank, process in [*running.items()]:
            if (code := process.exitcode) is None:
                continue
            del running[rank]
            if code or rank in board.silent():
                exits[rank] = Exit(code, time.monotonic_ns())
                ends = min(ends, time.monotonic() + _GRACE_S)
    for process in running.values():
        process.kill()
        process.join()
    return NodeResult(exits=exits)


def _variables(node: Node, local: int, rank: int) -> dict[str, str]:
    """Variables that torchrun sets for a rank, but for the file of its errors; and its host."""
    world = node.nodes * node.ranks_per_node
    host = {"NCCL_HOSTID": f"node{node.node}-rank{local}"} if node.ranks_are_hosts else {}
    return {
        **host,
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{local}",
        "GROUP_RANK": f"{node.node}",
        "ROLE_RANK": f"{rank}",
        "ROLE_NAME": "rank",
        "WORLD_SIZE": f"{world}",
        "LOCAL_WORLD_SIZE": f"{node.ranks_per_node}",
        "GROUP_WORLD_SIZE": f"{node.nodes}",
        "ROLE_WORLD_SIZE": f"{world}",
        "MASTER_ADDR": node.master_address,
        "MASTER_PORT": f"{node.port}",
        "TORCHELASTIC_RUN_ID": "fcdp",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _run(
    launch: Launch, board: Board, variables: Mapping[str, str], returned: Barrier, agent: int
) -> None:
    """Call the launch's function with what torchrun sets for this rank.

    Its process stays until all ranks of the node have ``returned``; ``agent`` is the pid of the
    process that forked it.
    """
    lifetimes.die_with(agent)
    os.environ.update(variables)
    rank = int(os.environ["RANK"])
    _write_to(launch.logs / f"rank{rank}.log")
    with board.alive(rank):
        try:
            # OpenMP has read the variable where torch was imported, in another process.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            resolve_name(launch.entry)(*launch.arguments)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                board.report(rank, error)
                traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                # Without waiting for threads or destructors, in which a rank might hang.
                os._exit(1)
    returned.wait()


def _write_to(path: Path) -> None:
    """Send standard output and error, Python's and the libraries', to one file, line by line."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # A process that is killed loses its last line at most.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)

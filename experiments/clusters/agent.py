"""The agent of one node: launches the node's ranks, as torchrun would; and what each rank does.

An emulated node's is forked from a process that has imported everything, torchelastic included, and
enters the node's namespace.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pyroute2 import netns
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.multiprocessing.spawn import ProcessContext

from experiments.clusters import lifetimes, preload
from experiments.clusters.causes import Exit, NodeResult
from experiments.clusters.launch import SECRET, Launch, Machine, Node, function

#: Seconds between two looks at the ranks, ...
_MONITOR_INTERVAL_S = 0.05
#: ... until the nodes have met, ...
_MEETING_TIMEOUT_S = 60
#: ... for the ranks of a node to end by themselves after the first failure, and after SIGKILL.
_GRACE_S = 1.0
_END_TIMEOUT_S = 5


def serve(node: Node, launch: Launch, parent: Connection) -> None:
    """Run the ranks of one node in this fresh process and send their ``NodeResult``."""
    me = frozenset({os.getpid()})
    _begin(launch.logs / f"node{node.node}.log", lambda: node.end_processes(me))
    with suppress(BrokenPipeError):  # the parent has given up meanwhile
        try:
            _settle(node)
            # The store where the nodes meet, which is node 0's, ends with its agent.
            agent = _agent(node, launch)
            parent.send(_result(agent))
            # Other nodes may still use the store: until the parent, who closes its end, has heard
            # from all of them.
            parent.poll(None)
        except Exception:
            error = f"the agent of node {node.node} failed:\n{traceback.format_exc()}"
            parent.send(NodeResult(error=error))


def serve_beside(machine: Machine, entry: str, log: Path, parent: Connection) -> None:
    """Call the function of a process beside the ranks; send what it ends with."""
    _begin(log, lambda: None)
    error = None
    try:
        _settle(machine)
        function(entry)()
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
    """Have this process on its machine, with its environment and modules."""
    os.environ.clear()
    os.environ.update(machine.environment)
    if machine.secret is not None:
        os.environ[SECRET] = machine.secret
    _put_temporary_files_in(machine.scratch)
    if machine.namespace is not None:
        netns.setns(machine.namespace, flags=0)
    _search_first(machine.environment.get("PYTHONPATH", "").split(os.pathsep))
    preload.import_modules(list(machine.preload))


def _put_temporary_files_in(directory: str) -> None:
    """Have temporary files of this node and its ranks meet no other's and end with the launch."""
    os.mkdir(directory)
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = None  # What was imported before may have asked for the directory already.


def _search_first(folders: Sequence[str]) -> None:
    """Import from these folders before all others, as an interpreter that starts with them does.

    Raises ``RuntimeError`` where a module that they have was preloaded from elsewhere.
    """
    new = [path for path in map(os.path.abspath, filter(None, folders)) if path not in sys.path]
    late = [name for name in sys.modules if "." not in name and PathFinder.find_spec(name, new)]
    if late:
        raise RuntimeError(f"{', '.join(late)}: preloaded, so not imported from {', '.join(new)}")
    sys.path[:0] = new


class _Agent(LocalElasticAgent):
    """Torchelastic's agent, but it lets the ranks of a failed node end by themselves first.

    Otherwise the first exit that it notices ends the other ranks at once, and the one that was
    the cause may not have said so yet. It also notices a rank that ends with code 0 too early.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exits: dict[int, Exit] = {}
        self._first_exit_s = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        leave_failures(self._pcontext._pc)  # type: ignore[union-attr]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for worker in worker_group.workers:
            # Ranks that return wait for the others of their node inside the next call.
            self._look_at(worker)
        if not self.exits:
            healthy: RunResult = super()._monitor_workers(worker_group)
            return healthy
        left = len(worker_group.workers) - len(self.exits)
        if left and time.monotonic() < self._first_exit_s + _GRACE_S:
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.FAILED)

    def _look_at(self, worker: Worker) -> None:
        if worker.global_rank in self.exits:
            return
        code = _exit_code(worker.id)
        if code is None:
            return
        if not self.exits:
            self._first_exit_s = time.monotonic()
        self.exits[worker.global_rank] = Exit(code, time.monotonic_ns())

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _END_TIMEOUT_S
    ) -> None:
        # Ranks have no handler for SIGTERM but what the launch's function may have set.
        super()._shutdown(signal.SIGKILL, _END_TIMEOUT_S)


def leave_failures(context: ProcessContext) -> None:
    """Have ``join`` of ``context`` pass over processes that failed while others run.

    Torch's own ends the others at once. A rank that failed between a look of ``_Agent`` and the one
    that follows within torchelastic had others ended before they could say what they had seen,
    the cause of it all among them.
    """
    join = context.join

    def pass_over(timeout: float | None = None, grace_period: float | None = None) -> bool:
        if timeout is None:  # all have returned, and none waits for another
            return bool(join(timeout, grace_period))
        for sentinel in wait([*context.sentinels], timeout):
            process = context.processes[context.sentinels[sentinel]]
            if _exit_code(process.pid) == 0:
                del context.sentinels[sentinel]
                process.join()
        return not context.sentinels

    context.join = pass_over  # type: ignore[method-assign]


def _exit_code(pid: int) -> int | None:
    """How a child ended, negative for a signal; ``None`` while it runs. It is not reaped."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class Meeting(StaticTCPRendezvous):
    """Torchrun's static rendezvous, but it listens at node 0's address only.

    Otherwise the store, which asks nobody who they are, is open on every interface of the node.
    """

    def get_backend(self) -> str:
        return "fcdp"

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and self._store is None:
            listener = socket.create_server((self.master_addr, self.master_port))
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        info: RendezvousInfo = super().next_rendezvous()
        return info


def _agent(node: Node, launch: Launch) -> _Agent:
    """The agent that launches the ranks of one node, as torchrun's would.

    Not through ``launch_agent``: it asks CUDA for its devices, after which no forked rank could
    use them, and it hides the agent.
    """
    spec = WorkerSpec(
        role="rank",
        local_world_size=node.ranks_per_node,
        rdzv_handler=Meeting(
            node.master_address,
            node.port,
            rank=node.node,
            world_size=node.nodes,
            run_id="fcdp",
            timeout=_MEETING_TIMEOUT_S,
        ),
        # As one object: torchelastic replaces "$" in arguments that are strings.
        entrypoint=_run,
        args=(launch, os.getpid()),
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        master_addr=node.master_address,
        master_port=node.port,
        local_addr=node.address,
    )
    return _Agent(
        spec,
        logs_specs=DefaultLogsSpecs(log_dir=node.scratch),
        start_method="fork",
        exit_barrier_timeout=node.timeout_s,
    )


def _result(agent: _Agent) -> NodeResult:
    """Launch the ranks and wait for them; returns how they ended."""
    result = agent.run()
    for rank, failure in result.failures.items():
        agent.exits.setdefault(rank, Exit(failure.exitcode, time.monotonic_ns()))
    return NodeResult(exits=agent.exits)


def _run(launch: Launch, agent: int) -> None:
    """Call the launch's function in the environment that torchelastic has set for this rank.

    ``agent`` is the pid of the process that forked this one.
    """
    lifetimes.die_with(agent)
    # Forked from torchelastic's agent, the rank would raise the agent's exception on SIGTERM, and
    # only once the interpreter runs again: a rank that waits in a collective would go on.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    _write_to(launch.logs / f"rank{rank}.log")
    with launch.board.alive(rank):
        try:
            # OpenMP has read the variable where torch was imported, in another process.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            function(launch.entry)(*launch.arguments)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                launch.board.report(rank, error)
                traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                # Without waiting for threads or destructors, in which a rank might hang.
                os._exit(1)


def _write_to(path: Path) -> None:
    """Send standard output and error, Python's and the libraries', to one file, line by line."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Whoever is killed has lost nothing but its last line.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)

"""Torchelastic, what torchrun itself runs, inside an agent that is already a forked process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
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

from experiments.clusters import ranks
from experiments.clusters.agent import Exit, Node, NodeResult

#: Seconds between two looks at the ranks, ...
_MONITOR_INTERVAL_S = 0.05
#: ... until the nodes have met, ...
_MEETING_TIMEOUT_S = 60
#: ... for the ranks of a node to end by themselves after the first failure, and after SIGKILL.
_GRACE_S = 1.0
_END_TIMEOUT_S = 5


class _Agent(LocalElasticAgent):
    """Torchelastic's agent, but it lets the ranks of a failed node end by themselves first.

    Otherwise the first exit that it notices ends the other ranks at once, and the one that was
    the cause may not have said so yet. It also notices a rank that ends with code 0 too early.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exits: dict[int, Exit] = {}
        self._first_exit_s = 0.0

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
        # Without reaping: torchelastic does that.
        ended = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        if not self.exits:
            self._first_exit_s = time.monotonic()
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.exits[worker.global_rank] = Exit(code, time.monotonic_ns())

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _END_TIMEOUT_S
    ) -> None:
        # Ranks have no handler for SIGTERM but what the job's function may have set.
        super()._shutdown(signal.SIGKILL, _END_TIMEOUT_S)


class _Meeting(StaticTCPRendezvous):
    """Torchelastic's meeting of known nodes, but it listens at node 0's address only.

    Otherwise the store, which asks nobody who they are, is open on every interface of the node.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(
            master_addr=node.master_address,
            master_port=node.port,
            rank=node.node,
            world_size=node.nodes,
            run_id="fcdp",
            timeout=_MEETING_TIMEOUT_S,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and self._store is None:
            listener = socket.create_server((self.master_addr, self.master_port))
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=timedelta(seconds=_MEETING_TIMEOUT_S),
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        info: RendezvousInfo = super().next_rendezvous()
        return info


@contextmanager
def launched(node: Node, job: ranks.Job) -> Iterator[NodeResult]:
    """Launch the ranks of one node, as torchrun would, and wait for them; yield how they ended.

    The store where the nodes meet, which is node 0's, ends with the context.
    Not through ``launch_agent``: it asks CUDA for its devices, after which no forked rank could
    use them, and it hides the agent.
    """
    spec = WorkerSpec(
        role="rank",
        local_world_size=node.ranks_per_node,
        rdzv_handler=_Meeting(node),
        # As one object: torchelastic replaces "$" in arguments that are strings.
        entrypoint=ranks.run,
        args=(job, os.getpid()),
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        master_addr=node.master_address,
        master_port=node.port,
        local_addr=node.address,
    )
    agent = _Agent(
        spec,
        logs_specs=DefaultLogsSpecs(log_dir=node.scratch),
        start_method="fork",
        exit_barrier_timeout=node.timeout_s,
    )
    result = agent.run()
    for rank, failure in result.failures.items():
        agent.exits.setdefault(rank, Exit(failure.exitcode, time.monotonic_ns()))
    yield NodeResult(exits=agent.exits)

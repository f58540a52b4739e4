"""Torchelastic, what torchrun itself runs, inside an agent that is already a forked process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from experiments.clusters import ranks
from experiments.clusters.agent import Node, NodeResult

#: Seconds between two looks at the ranks, and until the nodes have met.
_MONITOR_INTERVAL_S = 0.05
_MEETING_TIMEOUT_S = 60


class _Agent(LocalElasticAgent):
    """Torchelastic's agent, which reports one failed rank; this one knows the exits of all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exits: dict[int, tuple[int, int]] = {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for worker in worker_group.workers:
            # Looks without reaping: that is torchelastic's to do, just below.
            with suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None and ended.si_status != 0:
                    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                    self.exits.setdefault(worker.global_rank, (code, time.monotonic_ns()))
        result = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            self.exits.setdefault(rank, (failure.exitcode, time.monotonic_ns()))
        return result


@contextmanager
def launched(node: Node, job: ranks.Job) -> Iterator[NodeResult]:
    """Launch the ranks of one node, as torchrun would, and wait for them; yield how they ended.

    The store where the nodes meet, which is node 0's, ends with the context.
    Not through ``launch_agent``: it asks CUDA for its devices, after which no forked rank could
    use them, and it hides the agent.
    """
    meeting = RendezvousParameters(
        backend="static",
        endpoint=f"{node.master_address}:{node.port}",
        run_id="fcdp",
        min_nodes=node.nodes,
        max_nodes=node.nodes,
        local_addr=node.address,
        rank=node.node,
        timeout=_MEETING_TIMEOUT_S,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=node.ranks_per_node,
        rdzv_handler=registry.get_rendezvous_handler(meeting),
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
    agent.run()
    yield NodeResult(exits=agent.exits)

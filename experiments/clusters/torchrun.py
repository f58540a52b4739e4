"""``torchrun`` on one rented node, whose store listens on the network between nodes only.

Started by ``node``, in a process of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from experiments.clusters import lifetimes

if __name__ == "__main__":
    # Before torch is imported, which takes seconds: whoever started this may end meanwhile.
    lifetimes.die_with(int(sys.argv[2]))

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from experiments.clusters.messages import Order

#: The file that says which ranks failed, with their exit codes.
FAILURES = "failures.json"

_BACKEND = "fcdp"
#: Seconds until the nodes have met, ...
_MEETING_TIMEOUT_S = 60
#: ... and, after the first failure, for a node's other ranks to say what happened to them.
_GRACE_S = 1


class Meeting(StaticTCPRendezvous):
    """Torchrun's static rendezvous, but it listens at node 0's address only.

    Otherwise the store, which asks nobody who they are, is open on every interface of the node.
    """

    def __init__(self, node: int, nodes: int, address: tuple[str, int], timeout_s: int) -> None:
        super().__init__(*address, rank=node, world_size=nodes, run_id="fcdp", timeout=timeout_s)

    def get_backend(self) -> str:
        return _BACKEND

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


def main(folder: Path) -> int:
    """Run the ranks by the order in ``folder``; returns 1 and writes ``FAILURES`` if one fails."""
    order = Order.model_validate_json((folder / "order.json").read_bytes())

    def meeting(_: RendezvousParameters) -> Meeting:
        return Meeting(
            order.node, order.nodes, (order.master_address, order.port), _MEETING_TIMEOUT_S
        )

    rendezvous_handler_registry.register(_BACKEND, meeting)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(_GRACE_S)
    arguments = [
        f"--nnodes={order.nodes}",
        f"--nproc-per-node={order.ranks}",
        f"--rdzv-backend={_BACKEND}",
        f"--rdzv-endpoint={order.master_address}:{order.port}",
        f"--local-addr={order.address}",
        f"--log-dir={folder}",
        "--max-restarts=0",
        "--module",
        "experiments.clusters.ranks",
        str(folder),
        str(os.getpid()),
    ]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        (folder / FAILURES).write_text(json.dumps(codes), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Run cases of one client on ranks of this machine, and write what they found.

python -m tests.clients.ranks CLIENT NODES RANKS_PER_NODE OUT CASE...
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path


def environment(rank: int, nodes: int, per_node: int) -> dict[str, str]:
    """A rank's variables as torchrun sets them, and what keeps clients from the network."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "GLOO_SOCKET_IFNAME": "lo",
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }


def rank_of(rank: int, store: str, arguments: list[str]) -> None:
    client, nodes, per_node, out, *cases = arguments
    world = int(nodes) * int(per_node)
    os.environ.update(environment(rank, int(nodes), int(per_node)))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    import fcdp

    topology = fcdp.Topology.build(int(nodes), int(per_node), "cpu")
    module = import_module(f"tests.clients.cases_{client}")
    found = {case: module.CASES[case](topology) for case in cases}
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


def main(arguments: list[str]) -> int:
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        world = int(arguments[1]) * int(arguments[2])
        ranks = [
            start.Process(target=rank_of, args=(rank, f"{folder}/store", arguments))
            for rank in range(world)
        ]
        for each in ranks:
            each.start()
        while any(each.is_alive() for each in ranks):
            for each in ranks:
                each.join(0.2)
                if each.exitcode:  # the others would wait for it
                    for other in ranks:
                        other.kill()
    return max(abs(each.exitcode or 0) for each in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

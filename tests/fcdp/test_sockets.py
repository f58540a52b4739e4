"""What the groups of a topology cost each process: connections that are held for the whole run."""

from __future__ import annotations

import functools
import os
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fcdp
from fcdp.exchange import any_rank
from tests.ranks import _context

pytestmark = pytest.mark.ranks

NODES, RANKS_PER_NODE = 4, 3
PEERS = (RANKS_PER_NODE - 1) + (NODES - 1)


def sockets() -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def rank_of_an_accelerator(rank: int, store: str, pipe: Connection) -> None:
    """Build a topology as on an accelerator; gloo stands for its own backend."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    before = sockets()
    world_size = NODES * RANKS_PER_NODE
    init = functools.partial(
        dist.init_process_group, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    with (
        mock.patch.object(torch.accelerator, "set_device_index"),
        mock.patch.object(dist, "get_default_backend_for_device", return_value="gloo"),
        mock.patch.object(dist, "init_process_group", init),
    ):
        topology = fcdp.Topology.build(NODES, RANKS_PER_NODE, "cuda")
    pipe.send(sockets() - before)
    assert any_rank([rank == 5], topology) == [True]
    dist.all_gather_object([None] * world_size, rank)
    pipe.send(sockets() - before)
    pipe.recv()  # no rank leaves before all have counted


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts by /proc")
def test_connections_grow_with_the_neighbours_not_with_the_world(tmp_path: Path) -> None:
    """Gathers, reductions and the host have groups with neighbours; 12 ranks have 11 others."""
    ranks = []
    for rank in range(NODES * RANKS_PER_NODE):
        here, there = _context.Pipe()
        process = _context.Process(
            target=rank_of_an_accelerator, args=(rank, str(tmp_path / "store"), there), daemon=True
        )
        process.start()
        ranks.append((process, here))
    try:
        answers = []
        for _, pipe in ranks:
            assert pipe.poll(100)
            built = pipe.recv()
            assert pipe.poll(100)
            answers.append((built, pipe.recv()))
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()
    # Each group has a socket that listens; the world adds neighbours on its ring.
    listening = 7
    assert max(built for built, _ in answers) <= 3 * PEERS + listening + 2
    assert max(used for _, used in answers) <= 3 * PEERS + listening + 2

"""The table of host time, and that collectives do not grow with the number of nodes."""

from __future__ import annotations

import torch.distributed as dist

from scripts import host_cost, readme
from tests.ranks import Pools

COUNTS = {
    "gather, stale": {"inter-node": 1, "intra-node": 1},
    "gather, fresh": {"intra-node": 1},
    "reduce": {"inter-node": 1, "intra-node": 1},
    "FSDP2 gather": {"all ranks": 1},
    "FSDP2 reduce": {"all ranks": 1},
}


def test_the_record_holds_what_is_counted_on_all_shapes() -> None:
    rows = readme.committed("host-cost")["rows"]
    assert {(row["nodes"], row["ranks_per_node"]) for row in rows} == {*host_cost.SHAPES}
    assert len(rows) == len(host_cost.SHAPES) * len(COUNTS) * 2
    for row in rows:
        assert row["collectives"] == COUNTS[row["path"]]


def counted(nodes: int, detect_writes: bool) -> dict[str, host_cost.Counts]:
    dist.destroy_process_group()
    found = host_cost.counted(nodes, 8, detect_writes=detect_writes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_a_gather_and_a_reduction_are_one_collective_per_direction_on_any_nodes() -> None:
    pools = Pools()  # a process of its own: the fake group takes the place of the real one
    try:
        for detects in (True, False):
            for nodes in (2, 64):
                (found,) = pools.run(1, counted, nodes, detects)
                assert found == COUNTS
    finally:
        pools.close()

"""The tables of docs/host-cost.md, and that collectives do not grow with the number of nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist

from scripts import host_cost
from tests.ranks import Pools

COUNTS = {
    "gather, stale": {"inter-node": 1, "intra-node": 1},
    "gather, fresh": {"intra-node": 1},
    "reduce": {"inter-node": 1, "intra-node": 1},
    "FSDP2 gather": {"all ranks": 1},
    "FSDP2 reduce": {"all ranks": 1},
}


def record() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(host_cost.RECORD.read_text(encoding="utf-8"))
    return read


def test_the_tables_of_the_page_are_the_record() -> None:
    page = host_cost.PAGE.read_text(encoding="utf-8")
    assert host_cost.rewritten(page, record()) == page, "python -m scripts.host_cost --write"


def test_the_record_holds_what_is_counted_on_all_shapes() -> None:
    rows = record()["rows"]
    assert {(row["nodes"], row["ranks_per_node"]) for row in rows} == {*host_cost.SHAPES}
    assert len(rows) == len(host_cost.SHAPES) * len(COUNTS) * 2
    for row in rows:
        assert row["collectives"] == COUNTS[row["path"]]


def test_a_page_without_a_place_for_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 places for host-time"):
        host_cost.rewritten("# Host time\n", record())


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

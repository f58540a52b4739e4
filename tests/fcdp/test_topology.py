"""Where ranks stand, and what is refused."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist

import fcdp
from tests.fcdp.training import topology_of
from tests.ranks import Pools


def place(nodes: int, ranks_per_node: int) -> tuple[int, int, list[int], list[int]]:
    topology = topology_of(nodes, ranks_per_node)
    return (
        topology.node,
        topology.local_rank,
        dist.get_process_group_ranks(topology.intra),
        dist.get_process_group_ranks(topology.inter),
    )


def test_ranks_are_numbered_node_by_node(ranks: Pools) -> None:
    places = ranks.run(6, place, 2, 3)
    assert [(node, local) for node, local, _, _ in places] == [
        (node, local) for node in range(2) for local in range(3)
    ]
    assert places[4][2:] == ([3, 4, 5], [1, 4])


def build(nodes: int, ranks_per_node: int) -> str:
    with pytest.raises(ValueError, match="nodes × ranks_per_node") as error:
        fcdp.Topology.build(nodes, ranks_per_node, "cpu")
    return str(error.value)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(3, 1), (0, 2), (-1, -2), (2, 2)])
def test_a_shape_that_is_not_the_world_is_refused(
    ranks: Pools, nodes: int, ranks_per_node: int
) -> None:
    message = ranks.run(2, build, nodes, ranks_per_node)[0]
    assert f"{nodes} × {ranks_per_node}" in message
    assert "world size, 2" in message


def from_env(local: dict[int, tuple[int, int]]) -> tuple[int, int] | str:
    """``local``: rank → (local rank, local world size)."""
    rank = dist.get_rank()
    local_rank, size = local[rank]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(size),
    }
    with mock.patch.dict(os.environ, variables):
        try:
            topology = fcdp.Topology.from_env("cpu")
        except ValueError as error:
            return str(error)
        return topology.nodes, topology.ranks_per_node


def test_the_launcher_environment_is_read(ranks: Pools) -> None:
    assert ranks.run(2, from_env, {0: (0, 1), 1: (0, 1)}) == [(2, 1), (2, 1)]


def test_unequal_ranks_a_node_are_refused_on_every_rank(ranks: Pools) -> None:
    answers = ranks.run(3, from_env, {0: (0, 2), 1: (1, 2), 2: (0, 1)})
    assert all("nodes run 1 and 2 ranks" in str(answer) for answer in answers)


def test_ranks_out_of_order_are_refused_on_every_rank(ranks: Pools) -> None:
    answers = ranks.run(2, from_env, {0: (1, 2), 1: (0, 2)})
    assert all("rank 0 has local rank 1" in str(answer) for answer in answers)


def test_a_missing_launcher_is_named() -> None:
    with (
        mock.patch.dict(os.environ, {"RANK": "0"}, clear=True),
        pytest.raises(ValueError, match="WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not set"),
    ):
        fcdp.Topology.from_env("cpu")

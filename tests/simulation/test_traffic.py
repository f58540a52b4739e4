"""The exchanges' bytes against the closed forms of ``baselines.strategy``, and their times."""

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from baselines import strategy
from simulation import traffic as collectives
from tests.baselines.jobs import alone, job

nodes = st.integers(1, 64)
ranks = st.integers(1, 16)
sizes = st.integers(0, 10**12)


@given(st.integers(2, 16), ranks, st.integers(1, 4))
def test_a_hierarchy_sends_the_least_that_the_schedules_must(
    nodes: int, ranks: int, accumulation: int
) -> None:
    blocks: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 4), *blocks)
    fields = {"dtype": torch.bfloat16, "accumulation": accumulation}
    given_job = job(alone(nodes, ranks), blocks, **fields)
    total = 2 * sum(param.numel() for param in model.parameters())
    again = 2 * sum(param.numel() for block in blocks for param in block.parameters())

    def crossing(nbytes: float) -> float:
        return collectives.hierarchical(nbytes, nodes, ranks).inter_node_bytes

    least = accumulation * (crossing(total) + crossing(again) + crossing(total))
    assert least == pytest.approx(strategy.zero3_bytes(model, given_job))
    replicated = collectives.all_reduce(collectives.hierarchical(total, nodes, ranks))
    assert replicated.inter_node_bytes == pytest.approx(strategy.replicated_bytes(model, given_job))


@given(sizes, nodes, ranks)
def test_a_flat_ring_sends_no_less_than_a_hierarchy(nbytes: int, nodes: int, ranks: int) -> None:
    ring = collectives.flat(nbytes, nodes, ranks)
    least = collectives.hierarchical(nbytes, nodes, ranks)
    assert ring.inter_node_bytes >= least.inter_node_bytes * (1 - 1e-12)
    if nodes == 1:
        assert ring.inter_node_bytes == 0
        assert ring.intra_node_bytes == pytest.approx(least.intra_node_bytes)
    if ranks == 1:
        assert ring.intra_node_bytes == 0
        assert ring.inter_node_bytes == pytest.approx(least.inter_node_bytes)
    # All but one of the parts pass each edge.
    assert ring.inter_messages + ring.intra_messages == nodes * ranks - 1

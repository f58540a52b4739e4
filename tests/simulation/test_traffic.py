"""A ring over all ranks sends no less than exchanges by levels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation import traffic as collectives


@given(st.integers(0, 10**12), st.integers(1, 64), st.integers(1, 16))
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

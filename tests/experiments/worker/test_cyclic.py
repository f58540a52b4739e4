"""Cyclic Data Parallelism on an emulated cluster: what it sends by the kernel's count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.clusters.emulated import EmulatedCluster
from experiments.commands.kinds import PRELOADED
from experiments.records.cell import ClusterSpec
from tests.experiments import cells
from tests.experiments.cells import NODES, RANKS_PER_NODE, cell, model_spec

#: Headers, acknowledgements, and the barriers around the measured steps, per step and node.
FIXED_BYTES = 16_000


@pytest.fixture(scope="module")
def cluster(privileged: None) -> Iterator[EmulatedCluster]:
    spec = ClusterSpec(nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    with EmulatedCluster(spec, preload=[*PRELOADED, "experiments.worker.worker"]) as built:
        yield built


def test_the_cycle_sends_its_closed_form_and_learns_as_in_synchrony(
    cluster: EmulatedCluster, tmp_path: Path
) -> None:
    found = {
        strategy: cells.run(
            cluster, cell(strategy, model=model_spec("gpt2", layers=4)), tmp_path / strategy
        )
        for strategy in ("cyclic", "cyclic-ring", "cyclic-zero")
    }
    together = found.pop("cyclic").measurement.losses
    for finished in found.values():
        least = finished.measurement.inter_node_bytes_closed_form
        assert least is not None
        assert least <= finished.sent <= 1.05 * least + FIXED_BYTES
        assert finished.measurement.losses == pytest.approx(together, rel=1e-4)
        slots = finished.measurement.bytes_by_slot
        assert slots is not None
        assert len(slots) == 2 * NODES * RANKS_PER_NODE

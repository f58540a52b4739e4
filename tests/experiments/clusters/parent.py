"""A parent for tests that end it: runs ranks that wait for ever, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.clusters.emulated import EmulatedCluster
from experiments.records.cell import ClusterSpec
from tests.experiments.clusters.launches import ON_RANKS, run

if __name__ == "__main__":
    directory = sys.argv[1]
    with EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=2), preload=[ON_RANKS]) as cluster:
        run(cluster, Path(directory), "linger", directory, timeout_s=600)

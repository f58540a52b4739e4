"""A parent for tests that end it: runs ranks that wait for ever, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.clusters.emulated import EmulatedCluster
from experiments.records.cell import ClusterSpec

if __name__ == "__main__":
    directory = sys.argv[1]
    on_ranks = "tests.experiments.clusters.on_ranks"
    with EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=2), preload=[on_ranks]) as cluster:
        cluster.run(
            f"{on_ranks}:linger",
            [directory],
            logs=Path(directory),
            environment={},
            timeout_s=600,
        )

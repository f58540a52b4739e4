"""What a command does first, in a process of its own: get the privileges, build, run."""

from __future__ import annotations

import sys

from experiments.clusters.interface import ClusterError
from experiments.clusters.privileges import enter_user_namespace_if_needed

if __name__ == "__main__":
    try:
        enter_user_namespace_if_needed()
    except ClusterError as error:
        sys.exit(f"ClusterError: {error}")

    from pathlib import Path

    from experiments.clusters.emulated import EmulatedCluster
    from experiments.records.cell import ClusterSpec

    on_ranks = "tests.experiments.clusters.on_ranks"
    with EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=1), preload=[on_ranks]) as cluster:
        settings = cluster.shape(100_000_000)
        outcome = cluster.run(
            f"{on_ranks}:add_up", [], logs=Path(sys.argv[1]), environment={}, timeout_s=60
        )
    print(sys.argv[2:], settings["rate_bits_per_s"], outcome)

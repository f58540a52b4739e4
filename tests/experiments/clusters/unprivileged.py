"""The start of a command, in a process of its own: it gets privileges, builds, and runs."""

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
    from tests.experiments.clusters.on_ranks import ON_RANKS, run

    with EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=1), preload=[ON_RANKS]) as cluster:
        settings = cluster.shape(100_000_000)
        outcome = run(cluster, Path(sys.argv[1]), "add_up")
    print(sys.argv[2:], settings["rate_bits_per_s"], outcome)

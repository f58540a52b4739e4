"""A parent for tests that end it: its ranks, on emulated or rented nodes, wait for ever.

It launches others, in a folder of their own, where those of the first launch are ended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # what it forks imports this module again, and needs nothing of it
    from experiments.clusters.emulated import EmulatedCluster
    from experiments.records.cell import ClusterSpec
    from tests.experiments.clusters.on_ranks import ON_RANKS, run
    from tests.experiments.clusters.test_rented import cluster_of

    kind, directory = sys.argv[1:]
    emulated = EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=2), preload=[ON_RANKS])
    with emulated if kind == "emulated" else cluster_of("localhost", "localhost") as cluster:
        for launch in ("first", "second"):
            folder = Path(directory, launch)
            run(cluster, folder, "linger", str(folder), timeout_s=600)

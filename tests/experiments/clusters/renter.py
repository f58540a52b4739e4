"""A runner for tests that kill it: ranks on two rented nodes wait for ever."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.experiments.clusters.launches import run
from tests.experiments.clusters.test_rented import cluster_of

if __name__ == "__main__":
    with cluster_of("localhost", "localhost", ranks=1) as cluster:
        run(cluster, Path(sys.argv[1]), "linger", sys.argv[1], timeout_s=600)

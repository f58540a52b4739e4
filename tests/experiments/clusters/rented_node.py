"""One node of a rented cluster for tests, in a process of its own: ranks know the tests' jobs."""

from __future__ import annotations

import sys

from experiments.clusters import node
from experiments.clusters.allocation import Allocation
from experiments.clusters.interface import ClusterError

JOBS = "tests.experiments.clusters.jobs"

if __name__ == "__main__":
    try:
        node.serve(Allocation.from_env(), int(sys.argv[1]), [JOBS], patience_s=20, say=print)
    except ClusterError as error:
        sys.exit(f"error: {error}")

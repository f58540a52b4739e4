"""Launches of what ``on_ranks`` has, on clusters of any kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from experiments.clusters.interface import Cluster, Outcome

ON_RANKS = "tests.experiments.clusters.on_ranks"


def run(
    cluster: Cluster,
    logs: Path,
    function: str,
    *arguments: str,
    timeout_s: float = 100,
    **given: str,
) -> Outcome:
    """Call a function of ``on_ranks`` on every rank, whose environment has what is ``given``."""
    environment = {"TEST_CGROUP": os.environ.get("TEST_CGROUP", ""), **given}
    return cluster.run(
        f"{ON_RANKS}:{function}", arguments, logs=logs, environment=environment, timeout_s=timeout_s
    )


def pids_below(directory: Path) -> list[int]:
    """Ranks, what started them, and the ranks' own children, of those that linger."""
    return [pid for path in directory.glob("*.pids") for pid in json.loads(path.read_text())]

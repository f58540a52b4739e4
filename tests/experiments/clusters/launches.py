"""Launches of what ``on_ranks`` has, on clusters of any kind."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from experiments.clusters.interface import Cluster, Launch, Outcome

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
    entry = f"{ON_RANKS}:{function}"
    common = {"logs": logs, "environment": environment, "timeout_s": timeout_s}
    return cluster.run(Launch(entry=entry, arguments=arguments, **common))


def numbers(seen: Mapping[str, str]) -> tuple[int, ...]:
    """A rank's own, how many there are, both on its node, and the node's, as torchrun sets them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return tuple(int(seen[name]) for name in names)


def pids_below(directory: Path) -> list[int]:
    """Ranks, what started them, and the ranks' own children, of those that linger."""
    return [pid for path in directory.glob("*.pids") for pid in json.loads(path.read_text())]

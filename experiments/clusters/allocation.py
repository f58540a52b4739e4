"""Rented nodes as the launcher describes them, in variables that are the same on every node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.clusters.interface import ClusterError
from experiments.records import ClusterSpec

_SHORTEST_TOKEN = 32


@dataclass(frozen=True)
class Allocation:
    """``FCDP_HEAD``, ``FCDP_TOKEN``, ``FCDP_NODES`` and ``FCDP_RANKS_PER_NODE``."""

    #: Where the runner listens: its machine's address between nodes, and a free port.
    head: tuple[str, int]
    #: What an agent and the runner must both know.
    token: bytes = field(repr=False)
    nodes: int
    ranks_per_node: int

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Allocation:
        """Raises ``ClusterError`` naming the variable that is missing or not allowed."""
        return cls(
            head=_head(environment.get("FCDP_HEAD", "")),
            token=_token(environment.get("FCDP_TOKEN", "")),
            nodes=_count("FCDP_NODES", environment.get("FCDP_NODES", "")),
            ranks_per_node=_ranks(environment),
        )

    @property
    def spec(self) -> ClusterSpec:
        """The cluster that a matrix runs on here, whatever its file names."""
        return ClusterSpec(kind="rented", nodes=self.nodes, ranks_per_node=self.ranks_per_node)


def _head(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 1024 <= int(port) <= 65535:
        raise ClusterError(
            f"FCDP_HEAD = {text!r}: allowed is HOST:PORT, the address of the runner's machine on "
            "the network between nodes and a free port from 1024 to 65535"
        )
    return host, int(port)


def _token(text: str) -> bytes:
    # Never shown, not even a wrong one.
    if len(text.strip()) < _SHORTEST_TOKEN:
        raise ClusterError(
            f"FCDP_TOKEN: allowed are {_SHORTEST_TOKEN} characters or more, the same on every "
            f"node; `openssl rand -hex {_SHORTEST_TOKEN}` makes one"
        )
    return text.strip().encode()


def _ranks(environment: Mapping[str, str]) -> int:
    text = environment.get("FCDP_RANKS_PER_NODE", "")
    if text:
        return _count("FCDP_RANKS_PER_NODE", text)
    gpus = visible_gpus(environment)
    if gpus == 0:
        raise ClusterError(
            "FCDP_RANKS_PER_NODE is not set and this machine shows no GPU: allowed are whole "
            "numbers from 1"
        )
    return gpus


def _count(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ClusterError(f"{name} = {text!r}: allowed are whole numbers from 1")
    return int(text)


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many GPUs a rank would see; asked of the driver's files, so that CUDA does not start."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() not in ("", "-1")])
    return len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])

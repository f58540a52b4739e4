"""The interface of clusters: what the runner asks of one, whatever kind it is."""

from __future__ import annotations

import errno
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from baselines.description import ExtraProcess
from experiments.records.abilities import Abilities

if TYPE_CHECKING:
    from experiments.records.cell import AnyCluster  # processes on nodes do not wait for it


class ClusterError(RuntimeError):
    """An error of a cluster that cannot be built or used; it says what to do."""


def check_port(address: str, port: int) -> None:
    """Raise ``ClusterError`` if the ranks cannot meet there; it names a port where they can."""
    with socket.socket() as probe:
        # A port whose last connections merely wait to expire is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            alternative = "FCDP_PORT"
            if error.errno == errno.EADDRINUSE:
                probe.bind((address, 0))
                alternative += f"={probe.getsockname()[1]} is free"
            raise ClusterError(
                f"the ranks cannot meet at {address} port {port}: {error.strerror}; end what "
                f"listens there, or take another port: {alternative}"
            ) from error


class LostNodeError(ClusterError):
    """An error of a node that is gone, preempted or broken, and the cluster with it."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A function that every rank of a cluster calls once, in a process of its own."""

    #: "package.module:function".
    entry: str
    arguments: tuple[str, ...] = ()
    #: A folder: standard output and error of each rank go to a file in there.
    logs: Path
    #: Variables beside those that reach ranks anyway.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Seconds after which it is ended.
    timeout_s: float
    #: Processes beside the ranks, where the cluster can start some: each on a machine of its own,
    #: ended with the ranks.
    extra: tuple[ExtraProcess, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The end of one launch's ranks."""

    state: Literal["ok", "oom", "failed", "timeout"]
    #: Global rank whose error came first, and its traceback or signal; ``None`` when ``ok``.
    rank: int | None = None
    error: str | None = None


class Cluster(ABC):
    """``nodes`` × ``ranks_per_node`` places for processes, with a limited link between nodes.

    A context manager: ``__enter__`` builds it, ``__exit__`` leaves nothing behind.
    """

    can: Abilities

    def __init__(self, spec: AnyCluster) -> None:
        self.nodes, self.ranks_per_node = spec.nodes, spec.ranks_per_node

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Limit every node's egress to bits per second (``None``: no limit).

        With several groups, this limits links inside a group, and ``to_groups`` those between them.
        Returns what was set, for the record.
        """

    @abstractmethod
    def run(self, launch: Launch) -> Outcome:
        """Call the launch's function on every rank, in one fresh process per rank, and wait.

        Ranks have the environment that torchrun sets; ``TMPDIR`` is a directory of their node that
        ends with the launch.
        """

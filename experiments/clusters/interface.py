"""The interface of clusters: what the runner asks of one, whatever kind it is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from baselines.description import ExtraProcess
from experiments.records.abilities import Abilities


class ClusterError(RuntimeError):
    """An error of a cluster that cannot be built or used; it says what to do."""


def check_port(address: str, port: int) -> None:
    """Raise ``ClusterError`` if the ranks cannot meet there, with a port where they can."""

    def bind(port: int) -> int:
        with socket.socket() as probe:
            # A port whose last connections merely wait to expire is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return int(probe.getsockname()[1])

    try:
        bind(port)
    except OSError as error:
        other = f"FCDP_PORT={bind(0)} is free" if error.errno == errno.EADDRINUSE else "FCDP_PORT"
        raise ClusterError(
            f"the ranks cannot meet at {address} port {port}: {error.strerror}; end what listens "
            f"there, or take another port: {other}"
        ) from error


class LostNodeError(ClusterError):
    """An error of a node that is gone, preempted or broken, and the cluster with it."""


@dataclass(frozen=True)
class Outcome:
    """How the ranks of one launch, a call of ``Cluster.run``, ended."""

    state: Literal["ok", "oom", "failed", "timeout"]
    #: Global rank whose error came first, and its traceback or signal; ``None`` when ``ok``.
    rank: int | None = None
    error: str | None = None


class Cluster(Protocol):
    """``nodes`` × ``ranks_per_node`` places for processes, with a limited link between nodes.

    A context manager: ``__enter__`` builds it, ``__exit__`` leaves nothing behind.
    """

    can: Abilities
    nodes: int
    ranks_per_node: int

    def __enter__(self) -> Cluster: ...

    def __exit__(self, *_: object) -> None: ...

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Limit every node's egress to bits per second (``None``: no limit).

        Of nodes in several groups, to those of the own one; and ``to_groups`` to all others.
        Returns what was set, for the record.
        """
        ...

    def run(
        self,
        entry: str,
        arguments: Sequence[str],
        *,
        logs: Path,
        environment: Mapping[str, str],
        timeout_s: float,
        extra: Sequence[ExtraProcess] = (),
    ) -> Outcome:
        """Run the function ``entry`` ("package.module:function") on every rank and wait.

        ``function(*arguments)`` is called in one fresh process per rank, in the environment that
        torchrun sets; ``TMPDIR`` is a directory of its node that ends with the launch. Standard
        output and error of rank r go to files below ``logs``. ``extra`` are processes beside the
        ranks, of clusters that can start some: each on a machine of its own, ended with the ranks.
        """
        ...

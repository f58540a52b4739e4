"""A launch of ranks: what its processes are told of it and of the machine that they are on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from experiments.clusters import lifetimes
from experiments.clusters.causes import Board

#: The variable that has the secret of a launch with processes beside its ranks.
SECRET = "FCDP_RUN_SECRET"


@dataclass(frozen=True)
class Launch:
    """A function that every rank of a cluster calls once, in a process of its own."""

    #: "package.module:function".
    entry: str
    arguments: tuple[str, ...]
    logs: Path
    board: Board


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, as a process on it needs to know it."""

    #: The network namespace that is the machine; ``None`` for one that is real.
    namespace: str | None
    #: The whole environment of its processes, but for what torchrun adds and for secrets.
    environment: dict[str, str]
    #: A secret that all processes of the launch share, if it has processes beside its ranks.
    secret: str | None = field(default=None, repr=False)
    #: Modules that should be imported already.
    preload: tuple[str, ...] = ()
    #: A directory, not there yet, for temporary files: torchelastic's and the ranks'.
    scratch: str

    def end_processes(self, spare: frozenset[int] = frozenset()) -> None:
        """Kill what this process has started on the machine, but for ``spare``."""
        if self.namespace is None:
            lifetimes.end_descendants(spare)
        else:
            from experiments.clusters import namespaces  # its pyroute2, which real nodes do without

            namespaces.end_processes(self.namespace, spare)


@dataclass(frozen=True, kw_only=True)
class Node(Machine):
    """One node, as its agent needs to know it."""

    node: int
    nodes: int
    ranks_per_node: int
    #: Addresses of this node and of node 0, where the ranks meet.
    address: str
    master_address: str
    port: int
    timeout_s: float


def split(entry: str) -> tuple[str, str]:
    """Module and name of "package.module:function"; ``ValueError`` if it is not of that form."""
    module, _, name = entry.partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f'entry = {entry!r}: allowed is "package.module:function"')
    return module, name

"""Abilities of clusters, by their kind: who wants to know asks for that, never for the kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Evidence = Literal["measured", "emulated", "simulated"]
Kind = Literal["emulated", "rented", "simulated"]

#: Bits per second between which shaping works: below, a frame takes seconds; above, the rate in
#: bytes per second no longer fits the 32 bits of the kernel's message.
LOWEST_RATE = 10_000
HIGHEST_RATE = 8 * (2**32 - 1)


@dataclass(frozen=True)
class Abilities:
    """The abilities of one kind of cluster: those that are said."""

    #: How the figures of its records are obtained.
    evidence: Evidence
    #: Limit the links between nodes to a bandwidth of the cell's.
    limit_links: bool = False
    #: Start the processes of a cell's ranks; what starts none predicts them.
    start_processes: bool = False
    #: Start processes beside the ranks, each on a machine of its own.
    start_extra: bool = False
    #: Make the nodes themselves, from network namespaces, which takes rights.
    make_nodes: bool = False
    #: Say what hardware its nodes have, so that cells can be simulated on it.
    describe_hardware: bool = False
    #: Bits per second between which it limits links, if only between some.
    rates: tuple[int, int] | None = None


ABILITIES: Mapping[Kind, Abilities] = {
    "emulated": Abilities(
        evidence="emulated",
        limit_links=True,
        start_processes=True,
        start_extra=True,
        make_nodes=True,
        # As the host that the committed records were measured on.
        describe_hardware=True,
        rates=(LOWEST_RATE, HIGHEST_RATE),
    ),
    "rented": Abilities(evidence="measured", start_processes=True),
    "simulated": Abilities(evidence="simulated", limit_links=True, describe_hardware=True),
}

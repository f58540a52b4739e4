"""Abilities of each kind of cluster: code asks for an ability, never for a kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Evidence = Literal["measured", "emulated", "simulated"]
Kind = Literal["emulated", "rented", "simulated"]

#: Range of rates that traffic shaping can set, in bits per second: below, a frame takes seconds;
#: above, the rate in bytes per second no longer fits the 32 bits of the kernel's message.
LOWEST_RATE = 10_000
HIGHEST_RATE = 8 * (2**32 - 1)


@dataclass(frozen=True)
class Abilities:
    """The abilities of one kind of cluster; it lacks those that are not set."""

    #: How the figures of its records are obtained.
    evidence: Evidence
    #: Whether it limits the links between nodes to the cell's bandwidth.
    limit_links: bool = False
    #: Whether it starts the processes of a cell's ranks; cells are simulated otherwise.
    start_processes: bool = False
    #: Whether it starts processes beside the ranks, each on a machine of its own.
    start_extra: bool = False
    #: Whether it makes its nodes from network namespaces, which takes privileges.
    make_nodes: bool = False
    #: Whether the hardware of its nodes is known, so that cells can be simulated on it.
    describe_hardware: bool = False
    #: Range of rates that it can limit links to, in bits per second; ``None``: any.
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

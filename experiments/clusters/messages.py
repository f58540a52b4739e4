"""Messages between the runner and the process that a launcher starts on a node.

Each is one line of JSON, by standard input and output. The input stays open afterwards: where it is
closed, the node ends its ranks, whether the runner has asked for that or is gone. Until the answer
both sides send empty lines, so that each notices a link that has gone dead, whatever the launcher
makes of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from experiments.clusters.causes import NodeResult, Report
from experiments.clusters.launch import Node
from simulation.files import Strict

#: Seconds between two empty lines, and without any after which the other side is taken for lost.
BEAT_S = 5.0
SILENCE_S = 40.0


class Inquiry(Strict):
    """A question: what the node is."""

    kind: Literal["inquiry"] = "inquiry"
    #: An address of node 0 on the network between nodes.
    head: str
    #: The interface whose bytes are counted, if it is not the one that leads to ``head``.
    counted_interface: str | None


class Description(Strict):
    """The answer to an inquiry."""

    #: The node's address on the way to node 0, and the interface that has it.
    address: str
    interface: str
    commit: str | None
    #: Description of the node's network, as records have it.
    network: dict[str, Any]


class Order(Strict):
    """An order to start the ranks of one launch on the node."""

    kind: Literal["order"] = "order"
    #: The node, but for what it adds itself: its scratch, and variables that pass of its own.
    node: Node
    address: str
    entry: str
    arguments: list[str]
    #: Content of those arguments that are names of text files on the runner's machine.
    files: dict[str, str]
    #: Where logs go on the runner's machine, and a file in there that tells whether a node sees it.
    logs: str
    marker: str
    #: Seconds after which the node ends its ranks even if nobody asks for it.
    at_most_s: float


class Ended(Strict):
    """The answer to an order, once nothing of it runs on the node any more."""

    result: NodeResult
    reports: list[Report]
    #: The node's clock when it answered, by which both of these go: nodes' clocks differ.
    now_ns: int
    #: Logs by name, if the node does not see the runner's directory for them.
    logs: dict[str, str]
    out_of_memory_kills: int


question: TypeAdapter[Inquiry | Order] = TypeAdapter(
    Annotated[Inquiry | Order, Field(discriminator="kind")]
)

"""What LuWu's workers and server send each other in a step, by link and direction.

As ``baselines.luwu.plan`` has it: unit 0 is what is outside of the blocks. A worker is a rank;
those of one node share its link, so that the node receives as often as it has ranks. The server's
bytes do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulation.workload import Workload

#: The strategy's name.
LUWU = "luwu"
#: Forward and backward are each asked for by a message.
_PASSES = 2
#: AdamW's master and moments, in fp32.
STATE_BYTES = 12
#: A step reads one generation of the files and writes the other.
GENERATIONS = 2


@dataclass(frozen=True)
class Unit:
    """A layer by its parameters."""

    name: str
    trained: int
    frozen: int

    def pulled(self, workload: Workload) -> float:
        """Bytes that a worker pulls of it; frozen ones have been kept from an earlier step."""
        frozen = 0 if workload.cached else self.frozen
        return float(workload.element_bytes * (self.trained + frozen))

    def pushed(self, workload: Workload) -> float:
        """Bytes of its gradients."""
        return float(workload.element_bytes * self.trained)

    def held(self, workload: Workload) -> float:
        """Bytes of its parameters while a worker has it."""
        return float(workload.element_bytes * (self.trained + self.frozen))


@dataclass(frozen=True)
class Traffic:
    """Bytes per step, and messages that the server receives."""

    received: float
    sent: float
    file_read: float
    file_written: float
    server_messages: int
    #: Messages that a worker sends, its acknowledgements among them.
    worker_messages: int
    #: Ranks that share a node's link.
    ranks: int

    @property
    def links(self) -> dict[str, float]:
        """As a record's ``link_bytes_per_step``."""
        return {
            "node received": self.received * self.ranks,
            "node sent": self.sent * self.ranks,
            "server received": self.sent,
            "server sent": self.received,
            "server file_read": self.file_read,
            "server file_written": self.file_written,
        }


def units(workload: Workload) -> list[Unit]:
    """What is outside of the blocks, then the blocks."""
    model, adapters = workload.model, workload.block_adapters
    sizes = [("root", model.root_parameters, 0)]
    sizes += [(f"block {i}", model.block_parameters, adapters) for i in range(model.layers)]
    if workload.lora is None:
        return [Unit(name, base, 0) for name, base, _ in sizes]
    return [Unit(name, more, base) for name, base, more in sizes]


def passes(layers: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """Units in the order in which forward and backward pull them."""
    root, *blocks = layers
    return [root, *blocks, root], blocks[::-1]


def traffic(workload: Workload, workers: int, ranks_per_node: int) -> Traffic:
    """A steady step's."""
    layers = units(workload)
    forward, backward = passes(layers)
    pulled = [*forward, *backward]
    taken = _chunks(workload, pulled, gradients=False)
    pushed = _chunks(workload, layers, gradients=True)
    received = sum(unit.pulled(workload) for unit in pulled)
    state = STATE_BYTES * workload.trained
    return Traffic(
        received=received,
        sent=sum(unit.pushed(workload) for unit in layers),
        file_read=state + received,
        file_written=float(state + workload.element_bytes * workload.trained),
        server_messages=pushed + taken * (1 if workload.merged else workers) + _PASSES,
        worker_messages=pushed + taken + _PASSES,
        ranks=ranks_per_node,
    )


def _chunks(workload: Workload, pulled: Iterable[Unit], *, gradients: bool) -> int:
    """Messages that have these units; trained and frozen parameters do not share one."""
    size = workload.chunk_bytes // workload.element_bytes
    count = 0
    for unit in pulled:
        count += -(-unit.trained // size)
        if not gradients and not workload.cached:
            count += -(-unit.frozen // size)
    return count


def files_bytes(workload: Workload) -> float:
    """Bytes of the server's files: two generations of what is trained, and the frozen ones."""
    trained = GENERATIONS * (STATE_BYTES + workload.element_bytes) * workload.trained
    return float(trained + workload.element_bytes * workload.frozen)

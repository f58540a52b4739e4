"""What makes a cache entry stale, decided alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.optim import Optimizer

from fcdp.exchange import any_rank
from fcdp.topology import Topology
from fcdp.unit import Unit
from fcdp.verify import contents


class Staleness:
    """Raises the generation of units whose parameters have been written, on all ranks at once.

    A hit on one rank and a miss on another would leave the one without a partner in the
    collective, so no rank decides alone: after each event that may come with writes (a forward of
    the model, an optimizer step, a load) the next gather first exchanges one byte a unit, and a
    unit that any rank saw written is stale everywhere. The event is one that all ranks take part
    in; which rank saw which write does not matter.
    """

    def __init__(self, units: Sequence[Unit], topology: Topology, *, verify: bool = False) -> None:
        self._units = units
        self._topology = topology
        self._verify = verify
        self._asked = True
        #: What the units held when somebody was given their memory; see :meth:`hand_out`.
        self._handed_out: list[list[int]] | None = None

    def ask(self) -> None:
        """Have the ranks agree again at the next gather. Every rank must call it."""
        self._asked = True

    def invalidate(self) -> None:
        """Declare all units written on this rank."""
        for unit in self._units:
            unit.written = True
        self.ask()

    def hand_out(self) -> None:
        """Somebody is given the parameters' memory and may write to it where no counter counts.

        ``torch.distributed.checkpoint`` loads so, into a ``state_dict``. Contents are compared when
        the ranks agree next: one pass over this rank's shards now and one then, on each rank that
        was asked for them.
        """
        if self._handed_out is None:
            self._handed_out = [contents(unit) for unit in self._units]

    def stepped(self, optimizer: Optimizer) -> None:
        """Declare written what an optimizer updates; fused kernels leave no other trace."""
        updated = {
            id(param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        }
        for unit in self._units:
            if any(id(param) in updated for param in unit.params):
                unit.written = True
                self._asked = True

    def settle(self, unit: Unit) -> None:
        """Agree if asked to; then ``unit.generation`` holds for the gather about to start.

        Raises ``RuntimeError`` if this rank's parameters changed after the ranks had agreed.
        """
        if self._asked:
            self._agree()
        elif unit.stamp() != unit.agreed_stamp:
            raise RuntimeError(
                f"{unit.name}: parameters were written in place since the model's forward began; "
                "write between steps, or call fcdp.invalidate(model) on every rank afterwards"
            )

    def _agree(self) -> None:
        stamps = [unit.stamp() for unit in self._units]
        for index, before in enumerate(self._handed_out or []):
            self._units[index].written |= contents(self._units[index]) != before
        self._handed_out = None
        written = any_rank(
            [
                unit.written or stamp != unit.agreed_stamp
                for unit, stamp in zip(self._units, stamps, strict=True)
            ],
            self._topology,
        )
        for unit, stamp, stale in zip(self._units, stamps, written, strict=True):
            unit.generation += stale
            unit.agreed_stamp = stamp
            unit.written = False
        self._asked = False
        if self._verify:
            self._compare()

    def _compare(self) -> None:
        """Raise ``RuntimeError`` on every rank if generations differ between ranks."""
        mine = [unit.generation for unit in self._units]
        ranks = [mine for _ in range(self._topology.world_size)]
        dist.all_gather_object(ranks, mine, group=self._topology.mesh.get_group())
        for rank, theirs in enumerate(ranks):
            for unit, generation, first in zip(self._units, theirs, ranks[0], strict=True):
                if generation != first:
                    raise RuntimeError(
                        f"{unit.name}: rank {rank} is at generation {generation}, rank 0 at {first}"
                    )

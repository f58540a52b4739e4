"""The plan of where entries lie and how much host memory they take, before any is taken."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fcdp import grouping
from fcdp.arena import aligned
from fcdp.cache import memory, tiers
from fcdp.cache.policy import CachePolicy, Placement, TierName
from fcdp.partial_gradients import PartialsPlace, planned_sizes
from fcdp.sizes import in_words
from fcdp.topology import Topology
from fcdp.unit import Unit


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A policy applied to the units of one model."""

    placement: Placement
    topology: Topology
    look_ahead: int
    #: Units with memory in the host arena, and units with room in the disk's file.
    on_host: Sequence[Unit]
    on_disk: Sequence[Unit]
    #: Buffers for entries on their way to the disk and back.
    disk_buffers: int
    #: Bytes of each unit's partial gradients that wait on the host.
    partials: Mapping[Unit, int]
    #: Bytes of host memory a rank, by what takes them.
    parts: dict[str, int]

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        topology: Topology,
        policy: CachePolicy,
        *,
        look_ahead: int,
        partials_place: PartialsPlace,
        differences: bool = False,
    ) -> MemoryPlan:
        """``differences``: whether host memory keeps each rank's own shards as last sent."""
        placement = policy.place(units, topology)
        # Nothing ever crosses nodes in a cluster of one.
        placed = units if topology.nodes > 1 else []
        on_host = [unit for unit in placed if _planned_tier(placement, unit) == "host"]
        on_disk = [unit for unit in placed if "disk" in placement.preferences[unit]]
        sent = [unit for unit in placed if unit.trainable and placement.preferences[unit]]
        buffers = grouping.disk_buffers(look_ahead)
        partials = planned_sizes(partials_place, units, topology)
        parts = {
            "cache": tiers.arena_bytes(on_host, topology),
            "disk buffers": tiers.buffer_bytes(on_disk, topology, buffers),
            "partial gradients": sum(map(aligned, partials.values())),
            "shards as sent": differences * sum(unit.shard_bytes for unit in sent),
        }
        return cls(
            placement=placement,
            topology=topology,
            look_ahead=look_ahead,
            on_host=on_host,
            on_disk=on_disk,
            disk_buffers=buffers,
            partials=partials,
            parts=parts,
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of one node's ranks together, as if all held what this one does."""
        return self.topology.processes_per_node * sum(self.parts.values())

    def check(self) -> None:
        """Refuse before the first step what would end in the kernel's out-of-memory killer.

        Raises ``ValueError`` if this node has less free. All ranks ask before one of them takes
        anything, so that none counts what another has taken.
        """
        free = memory.available_host_memory()
        if free is not None and self.host_bytes > free:
            raise ValueError(
                f"{self.memory}, but only {in_words(free)} of host memory are free; use more "
                "nodes' memory, a smaller gather dtype, a Budget with less host memory, NoCache() "
                "or fcdp.CommOptions(partial_gradients='device') (what fcdp.shard has sharded goes "
                "to fcdp.cache_parameters now)"
            )

    def announce(self) -> None:
        """Rank 0 prints where all units lie to standard error, before memory is taken."""
        if self.topology.rank == 0:
            print(self, file=sys.stderr, flush=True)

    @property
    def memory(self) -> str:
        """Host memory that is taken, as people read it."""
        parts = ", ".join(
            f"{name} {in_words(nbytes)}" for name, nbytes in self.parts.items() if nbytes
        )
        ranks = self.topology.processes_per_node
        return f"fcdp: {in_words(self.host_bytes)} of host memory per node, {ranks} × ({parts})"

    def __str__(self) -> str:
        units = self.placement.preferences
        places = Counter(_where(self.placement, unit) for unit in units)
        where = f": {', '.join(f'{count} {place}' for place, count in places.items())}"
        if self.topology.nodes == 1:
            where = ", on one node: nothing crosses nodes, and nothing is cached"
            if (ranks := self.topology.world_size) > 1:
                nodes = ranks if ranks % 2 else 2
                where += f" (fcdp.Topology.build({nodes}, {ranks // nodes}) tries {nodes} nodes)"
        memory = f"; {self.memory.removeprefix('fcdp: ')}" if self.host_bytes else ""
        return f"fcdp: {len(units)} unit{'s' * (len(units) != 1)}{where}{memory}"


def _where(placement: Placement, unit: Unit) -> str:
    """Describe where a unit's entry lies."""
    tiers = [tier for tier in (_planned_tier(placement, unit),) if tier]
    if placement.guarded and "device" in placement.preferences[unit]:
        tiers.insert(0, "device")
    return " or ".join(tiers) or "gathered across nodes"


def _planned_tier(placement: Placement, unit: Unit) -> TierName | None:
    """The tier that memory is planned in: the host, for what only may go to the device."""
    preference = placement.preferences[unit]
    if preference[:1] == ("device",) and not placement.guarded:
        return "device"
    return next((tier for tier in preference if tier != "device"), None)

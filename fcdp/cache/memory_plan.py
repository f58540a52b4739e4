"""The plan of where entries lie and how much host memory they take, before any is taken."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch

from fcdp import grouping
from fcdp.agreement import on_all_ranks
from fcdp.arena import aligned
from fcdp.cache import memory, tiers
from fcdp.cache.policy import CachePolicy, Placement, TierName
from fcdp.exchange import any_rank
from fcdp.grouping import PartialsChoice, PartialsPlace
from fcdp.partial_gradients import planned_sizes
from fcdp.sizes import in_words
from fcdp.topology import Topology
from fcdp.unit import Unit

#: Tensors that come to each trained shard after set-up: its gradient and Adam's two moments.
_STATES = 3


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
    #: Bytes of all that wait on the device, from the first micro-batch to the last.
    device_partials_bytes: int
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
        partials_place: PartialsPlace | None,
        differences: bool = False,
    ) -> MemoryPlan:
        """Plan without asking the other ranks.

        ``partials_place`` is ``None`` where gradients of each micro-batch cross nodes;
        ``differences``: whether host memory keeps each rank's own shards as last sent.
        """
        placement = policy.place(units, topology)
        _check_tiers(placement, policy)
        # Nothing ever crosses nodes in a cluster of one.
        placed = units if topology.nodes > 1 else []
        on_host = [unit for unit in placed if _planned_tier(placement, unit) == "host"]
        on_disk = [unit for unit in placed if "disk" in placement.preferences[unit]]
        sent = [unit for unit in placed if unit.trainable and placement.preferences[unit]]
        buffers = grouping.disk_buffers(look_ahead)
        sums = planned_sizes(placed)
        partials = sums if partials_place == "host" else {}
        parts = {
            "cache": tiers.arena_bytes(on_host),
            "disk buffers": tiers.buffer_bytes(on_disk, buffers),
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
            device_partials_bytes=sum(sums.values()) if partials_place == "device" else 0,
            parts=parts,
        )

    @classmethod
    def choose(
        cls,
        units: Sequence[Unit],
        topology: Topology,
        policy: CachePolicy,
        *,
        partial_gradients: PartialsChoice,
        device: torch.device,
        **options: Any,
    ) -> MemoryPlan:
        """Plan with the place of partial gradients that ``partial_gradients`` chooses. Collective.

        With ``auto`` they wait on the host if on some rank they are too large for what is free on
        ``device``, and every node has host memory for them, beside what the optimizer will add to
        shards that are there. ``options`` are those of ``of``.
        """

        def plan(**place: Any) -> MemoryPlan:
            # A policy may be the user's own code.
            make = partial(cls.of, units, topology, policy, **place, **options)
            return on_all_ranks(f"policy = {policy}", topology, make)

        if partial_gradients == "each":
            return plan(partials_place=None)
        if partial_gradients != "auto":
            return plan(partials_place=partial_gradients)
        on_device = plan(partials_place="device")
        if device.type == "cpu" or not on_device.device_partials_bytes:
            return on_device
        on_host = plan(partials_place="host")
        free = memory.device_usage(device).free
        fits = grouping.sums_fit(on_device.device_partials_bytes, free)
        later = _STATES * sum(map(_offloaded_bytes, units))
        too_large, lacks_host = any_rank([not fits, not on_host.fits_beside(later)], topology)
        return on_host if too_large and not lacks_host else on_device

    @property
    def host_bytes(self) -> int:
        """Bytes of one node's ranks together, as if all held what this one does."""
        return self.topology.processes_per_node * sum(self.parts.values())

    def fits_beside(self, others: int = 0) -> bool:
        """Whether this node has the planned host memory and ``others`` more bytes per rank."""
        free = memory.available_host_memory()
        return free is None or self.host_bytes + self.topology.processes_per_node * others <= free

    def check(self) -> None:
        """Refuse before the first step what would end in the kernel's out-of-memory killer.

        Raises ``ValueError`` if this node has less free. All ranks ask before one of them takes
        anything, so that none counts what another has taken.
        """
        if not self.fits_beside():
            free = memory.available_host_memory() or 0
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
        if nbytes := self.device_partials_bytes:
            memory += f"; partial gradients of fcdp.accumulate: {in_words(nbytes)} on each device"
        return f"fcdp: {len(units)} unit{'s' * (len(units) != 1)}{where}{memory}"


def _offloaded_bytes(unit: Unit) -> int:
    """Bytes of the unit's trained shards that are in host memory."""
    shards = (param.to_local() for param in unit.params if param.requires_grad)
    return sum(shard.nbytes for shard in shards if shard.device.type == "cpu")


def _check_tiers(placement: Placement, policy: CachePolicy) -> None:
    """Raise ``ValueError`` for tiers that a user's policy cannot have."""
    allowed = [*get_args(TierName)]
    if policy.directory is None:
        allowed.remove("disk")
    for unit, preference in placement.preferences.items():
        if others := [tier for tier in preference if tier not in allowed]:
            raise ValueError(
                f"preferences of {unit.name} = {preference}: {others[0]!r} must be one of "
                f"{', '.join(allowed)} ('disk' where the policy has a directory)"
            )


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

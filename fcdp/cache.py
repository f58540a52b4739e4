"""The cache: one entry a unit, each in the tier that the policy chooses for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fcdp.ledger import Ledger, Phase
from fcdp.memory import device_usage
from fcdp.plan import Plan
from fcdp.schedule import Schedule
from fcdp.tiers.device import DeviceTier
from fcdp.tiers.disk import DiskTier
from fcdp.tiers.host import HostTier
from fcdp.tiers.tier import Tier, TierName, TierUnavailable
from fcdp.topology import Topology
from fcdp.unit import Unit
from fcdp.verify import checksum

logger = logging.getLogger("fcdp")


@dataclass(frozen=True)
class Safety:
    """What to pay for being sure: see ``fcdp.shard``."""

    verify: bool = False
    poison: bool = False


@dataclass(frozen=True)
class _Entry:
    tier: TierName
    generation: int
    #: Of each node's shard in node order, this rank's own too; only with ``verify``.
    checksums: torch.Tensor | None


class Cache:
    """Follows the placement, falls to the next tier where one cannot be had, counts the bytes."""

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        plan: Plan,
        ledger: Ledger,
        *,
        directory: Path | None,
        safety: Safety,
    ) -> None:
        """Raises ``ValueError`` for an unusable directory."""
        self._topology = topology
        self._device = device
        self._ledger = ledger
        self._look_ahead = plan.look_ahead
        self._safety = safety
        self._schedule = Schedule()
        self._entries: dict[Unit, _Entry] = {}
        #: The generation that each unit was last given to store: alike on every rank.
        self._offered: dict[Unit, int] = {}
        #: Units that every rank holds, in memory that stays theirs.
        self._settled: set[Unit] = set()
        self._fallen: set[TierName] = set()
        self.placement = plan.placement
        self._on_host = frozenset(plan.on_host)
        self._tiers: dict[TierName, Tier] = {}
        self._device_tier = self._tiers["device"] = DeviceTier(topology, device)
        self._host_tier = self._tiers["host"] = HostTier(
            plan.on_host, topology, device, look_ahead=plan.look_ahead, poison=safety.poison
        )
        self._disk_tier: DiskTier | None = None
        if plan.on_disk and directory is not None:
            self._disk_tier = self._tiers["disk"] = DiskTier(
                plan.on_disk, topology, device, directory, buffers=plan.disk_buffers
            )
        self._account()

    def step_begins(self) -> None:
        """A new forward of the model: the order of gathers starts again."""
        self._schedule.begin()

    def stale(self, unit: Unit) -> bool:
        """Whether no rank can hold the unit's present generation; the same on every rank."""
        return self._offered.get(unit) != unit.generation or not self.placement.preferences[unit]

    def fallible(self, unit: Unit) -> bool:
        """Whether a rank may lack the entry that others hold; the same on every rank.

        A disk may fail at any time. Memory that was not planned may be refused to some ranks.
        """
        if "disk" in self.placement.preferences[unit]:
            return True
        return unit not in self._on_host and unit not in self._settled

    def settle(self, unit: Unit) -> None:
        """Every rank holds the unit. Memory once taken stays, unless a policy may give it back."""
        if not self.placement.guarded:
            self._settled.add(unit)

    def holds(self, unit: Unit) -> bool:
        """Whether this rank can load the unit's present generation. May wait for a disk."""
        entry = self._entries.get(unit)
        return (
            entry is not None
            and entry.generation == unit.generation
            and self._tiers[entry.tier].intact(unit)
        )

    def store(self, unit: Unit, shards: Sequence[torch.Tensor], phase: Phase) -> None:
        """Keep the shards of the other nodes (given one a node, own included)."""
        self._offered[unit] = unit.generation
        if self.placement.guarded:
            # What is admitted depends on memory without the entry that is to be replaced.
            self._forget(unit)
        self._put(unit, shards, phase, self._wanted(unit))

    def load(self, unit: Unit, shards: Sequence[torch.Tensor], phase: Phase) -> None:
        """Fill the shards of the other nodes (own untouched). Raises ``RuntimeError`` with
        ``verify`` if they are not what was stored."""
        entry = self._entries[unit]
        self._tiers[entry.tier].load(unit, shards)
        self._count(unit, entry.tier, phase, inward=False)
        if entry.checksums is not None:
            self._compare(unit, entry, entry.checksums, self._checksums(shards))
        if self.placement.moves:
            wanted = self._wanted(unit)
            if wanted and wanted[0] != entry.tier:
                self._forget(unit)
                self._put(unit, shards, phase, wanted)

    def follow(self, unit: Unit) -> None:
        """The unit is gathered now: fetch ahead what comes after it."""
        for coming in self._schedule.follow(unit, self._look_ahead):
            entry = self._entries.get(coming)
            if entry is not None and entry.generation == coming.generation:
                self._tiers[entry.tier].expect(coming)

    def poison(self, unit: Unit) -> None:
        """The unit has changed: with ``poison``, a late read of the old entry gives NaN."""
        if self._safety.poison:
            self._forget(unit)
            self._settled.discard(unit)

    def tier_of(self, unit: Unit) -> TierName | None:
        entry = self._entries.get(unit)
        return None if entry is None else entry.tier

    def _wanted(self, unit: Unit) -> tuple[TierName, ...]:
        """The unit's tiers in order of preference, as memory is now."""
        preference = self.placement.preferences[unit]
        if "device" not in preference or not self.placement.guarded:
            return preference
        if self.placement.admits(unit, device_usage(self._device)):
            return preference
        return tuple(tier for tier in preference if tier != "device")

    def _put(
        self,
        unit: Unit,
        shards: Sequence[torch.Tensor],
        phase: Phase,
        preference: Sequence[TierName],
    ) -> None:
        before = self._entries.pop(unit, None)
        for tier in preference:
            try:
                self._tiers[tier].store(unit, shards)
            except TierUnavailable as reason:
                self._say(unit, tier, reason)
                continue
            checksums = self._checksums(shards) if self._safety.verify else None
            self._entries[unit] = _Entry(tier, unit.generation, checksums)
            self._count(unit, tier, phase, inward=True)
            break
        if before is not None and before.tier != self.tier_of(unit):
            self._tiers[before.tier].drop(unit)
        self._account()

    def _forget(self, unit: Unit) -> None:
        entry = self._entries.pop(unit, None)
        if entry is not None:
            self._tiers[entry.tier].drop(unit)

    def _say(self, unit: Unit, tier: TierName, reason: TierUnavailable) -> None:
        if tier not in self._fallen:
            self._fallen.add(tier)
            logger.warning(
                "%s cache: %s for %s; using the next tier for what does not fit",
                tier,
                reason,
                unit.name,
            )

    def _count(self, unit: Unit, tier: TierName, phase: Phase, *, inward: bool) -> None:
        count = (self._topology.nodes - 1) * unit.shard_bytes
        if tier == "disk":
            self._ledger.add("disk", phase, count)
        if tier != "device":
            self._ledger.add("device_to_host" if inward else "host_to_device", phase, count)

    def _compare(
        self, unit: Unit, entry: _Entry, stored: torch.Tensor, loaded: torch.Tensor
    ) -> None:
        """Raise ``RuntimeError`` if an entry, or the own shard beside it, is not what it was."""
        node, rank = self._topology.node, self._topology.rank
        differ = (stored != loaded).tolist()
        if differ.pop(node):
            raise RuntimeError(
                f"{unit.name}: rank {rank} has other parameters than were gathered as generation "
                f"{entry.generation}, by a write that nothing showed; call fcdp.invalidate(model) "
                "on every rank after such writes"
            )
        if any(differ):
            raise RuntimeError(
                f"{unit.name}: rank {rank} read from the {entry.tier} cache other bytes than it "
                f"stored (generation {entry.generation})"
            )

    def _account(self) -> None:
        self._ledger.device_cache_bytes = self._device_tier.nbytes
        buffers = self._disk_tier.nbytes if self._disk_tier is not None else 0
        self._ledger.host_cache_bytes = self._host_tier.nbytes + buffers

    def _checksums(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([checksum(shard) for shard in shards])

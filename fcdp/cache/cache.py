"""The cache: one entry per unit, each in the tier that the policy chooses for it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcdp.cache.memory import Usage, allocated_bytes, device_usage
from fcdp.cache.memory_plan import MemoryPlan
from fcdp.cache.policy import TierName
from fcdp.cache.tiers import DeviceTier, DiskTier, HostTier, Tier, TierUnavailable
from fcdp.checksum import checksum
from fcdp.counts import Ledger, Phase, profiled
from fcdp.streams import Slice, Slices, Streams
from fcdp.unit import Unit, entry_size

logger = logging.getLogger("fcdp")


@dataclass(eq=False)
class Entry:
    """Entry of one unit in the cache.

    A write makes the entry stale: ``generation`` grows, alike on every rank. The next gather
    crosses nodes and offers the slice to every rank's cache. From then on the entry is fresh, and
    each rank may read what it could keep: in the tier ``tier``, and, copied ahead of its gather, in
    ``staged``.
    """

    unit: Unit
    #: Whether the policy has a tier for it; and whether a rank may lack what others hold, as a disk
    #: may fail at any time, and memory that was not planned be refused. Alike on every rank.
    placed: bool = True
    fallible: bool = False
    #: Version of the parameters; grows with each write, alike on every rank.
    generation: int = 1
    #: Version that was last offered to every rank's cache; alike on every rank.
    offered: int = 0
    #: Where this rank keeps a slice, and of which version. ``None``: nowhere.
    tier: TierName | None = None
    held: int = 0
    #: A copy on the device, ahead of the gather that will read it.
    staged: Slice | None = None
    #: Every rank holds it, in memory that stays: nobody needs to ask. Alike on every rank.
    settled: bool = False
    #: Every rank can send and apply a difference from the version last offered, as the ranks agreed
    #: before this pass. Alike on every rank.
    based: bool = False
    #: Version that was last not worth caching; and whether a gather then missed it.
    passed_over: int = 0
    missed: bool = False
    #: The unit's dtype has changed since set-up, and a warning was logged.
    resized: bool = False
    #: With ``verify``: checksums of the slice's rows as stored.
    checksums: torch.Tensor | None = None

    @property
    def fresh(self) -> bool:
        """Whether ranks can hold what the parameters are now."""
        return self.offered == self.generation

    @property
    def readable(self) -> bool:
        """Whether this rank has what the parameters are now."""
        return self.tier is not None and self.held == self.generation


class Cache:
    """Follows the placement, falls to the next tier where one cannot be had, counts the bytes."""

    def __init__(
        self,
        entries: Mapping[Unit, Entry],
        streams: Streams,
        *,
        plan: MemoryPlan,
        ledger: Ledger,
        directory: Path | None,
        verify: bool,
        poison: bool,
    ) -> None:
        """Take the memory of ``plan``; ``verify`` and ``poison`` are ``fcdp.CacheOptions``'s.

        Raises ``ValueError`` for an unusable directory.
        """
        self._entries = entries
        self._streams = streams
        self._ledger = ledger
        self._look_ahead = plan.look_ahead
        self._verify, self._poison = verify, poison
        self._fallen: set[TierName] = set()
        self.placement = plan.placement
        #: Bytes of each entry.
        self._nbytes = {unit: entry_size(unit) for unit in entries}
        on_host = frozenset(plan.on_host)
        for unit, entry in entries.items():
            preference = plan.placement.preferences[unit]
            entry.placed = bool(preference)
            entry.fallible = "disk" in preference or unit not in on_host
        #: Device memory in use as first queried in this pass; and bytes then: of all tensors, where
        #: PyTorch's allocator counts them, and of the device tier.
        self._seen: tuple[Usage, int | None, int] | None = None
        #: How many entries are staged.
        self._staged = 0
        #: Slices that loads fill, each released once all that reads it is queued. None is retained:
        #: while one is filled ahead, the one before it is being read.
        self.staging = Slices(streams, streams.copies_in, retain=0)
        self._tiers: dict[TierName, Tier] = {}
        self._device_tier = self._tiers["device"] = DeviceTier(streams)
        self._host_tier = self._tiers["host"] = HostTier(plan.on_host, streams, poison=poison)
        self._disk_tier: DiskTier | None = None
        if plan.on_disk and directory is not None:
            self._disk_tier = self._tiers["disk"] = DiskTier(
                plan.on_disk, streams, directory=directory, buffers=plan.disk_buffers
            )
        self._account()

    def begin_pass(self) -> None:
        """Ask for the device's memory in use again, and drop copies ahead that nobody has read.

        They are of a pass that took another path. They would take device memory, and the place of
        what is to be fetched ahead, until the unit is gathered again.
        """
        self._seen = None
        for entry in self._entries.values():
            self._unstage(entry)

    def has_offered(self, entry: Entry) -> bool:
        """Whether this rank can load the version last offered; may wait for a disk."""
        if entry.tier is None or entry.held != entry.offered:
            return False
        return entry.tier != "disk" or self._tiers["disk"].intact(entry.unit)

    def stays(self, unit: Unit) -> bool:
        """Whether a rank that has the unit's entry has it from then on; alike on every rank.

        Memory once taken stays, unless a policy may give it back; a disk may fail at any time.
        """
        return not (self.placement.guarded or "disk" in self.placement.preferences[unit])

    def store(self, entry: Entry, source: Slice, phase: Phase) -> None:
        """Keep the other nodes' rows of a slice that every rank was given."""
        entry.missed |= entry.passed_over == entry.generation
        entry.offered = entry.generation
        if self.placement.guarded:
            # Admission depends on memory without the entry that is to be replaced.
            self._forget(entry)
        preference = self._preference(entry.unit, stored=True)
        self._put(entry, source, phase, preference=preference)

    def pass_over(self, entry: Entry) -> None:
        """Note that nothing was kept of what every rank was given.

        Not earlier: ranks that run out of memory in one gather are not all at the same place in it.
        """
        entry.passed_over = entry.generation

    def load(self, entry: Entry, phase: Phase, *, output: torch.Tensor, home: Any) -> Slice:
        """Return the slice of a hit; its ``access`` says when it may be read.

        ``output`` is the gather's (n·L·s), allocated on the stream ``home``. Raises
        ``RuntimeError`` with ``verify`` if the rows are not what was stored.
        """
        assert entry.tier is not None, f"{entry.unit.name}: loaded without a hit"
        loaded = self._take_staged(entry)
        if loaded is None:
            loaded = self.staging.take_for(output, entry.unit.topology, home, with_own=False)
            self._fill(loaded, entry.unit, entry.tier)
        self._count(entry.unit, entry.tier, phase, inward=False)
        stored = entry.checksums
        if stored is not None and not torch.equal(stored, self._checksums(loaded)):
            raise RuntimeError(
                f"{entry.unit.name}: rank {dist.get_rank()} read from the {entry.tier} cache other "
                f"bytes than it stored (generation {entry.generation})"
            )
        if self.placement.moves:
            preference = self._preference(entry.unit, stored=False)
            if preference and preference[0] != entry.tier:
                self._forget(entry)
                self._put(entry, loaded, phase, preference=preference)
        return loaded

    def load_stale(self, entry: Entry, phase: Phase, target: Slice) -> None:
        """Fill ``target`` with what this rank holds of a stale entry."""
        assert entry.tier is not None, f"{entry.unit.name}: nothing is held"
        self._fill(target, entry.unit, entry.tier)
        self._count(entry.unit, entry.tier, phase, inward=False)

    def expect(self, coming: Sequence[Entry]) -> None:
        """Fetch ahead what is going to be read next."""
        for entry in coming:
            if not entry.readable:  # what is held is never newer than offered
                continue
            if entry.tier == "disk" and self._disk_tier is not None:
                self._disk_tier.expect(entry.unit)
            in_memory = entry.tier == "host" and not self._streams.on_host
            if in_memory and entry.staged is None and self._staged < self._look_ahead:
                # Copied ahead of the gather that reads it, which waits for no queue but its own;
                # not one byte moves twice over the host link.
                rows, size = entry.unit.topology.nodes - 1, entry.unit.shard_bytes
                entry.staged = self.staging.take(rows, size, torch.uint8, own_row=None)
                self._staged += 1
                self._fill(entry.staged, entry.unit, "host")

    def drop_resized(self, entry: Entry) -> None:
        """Keep nothing of a unit whose dtype has changed: its memory was planned for another.

        Alike on every rank. It crosses nodes at each gather, unless it changes back.
        """
        self._forget(entry)
        entry.offered, entry.based = 0, False
        if not entry.resized:
            entry.resized = True
            logger.warning(
                "%s: its dtype has changed since FCDP was set up; it is gathered across nodes each "
                "time. Change the dtype before, or with MixedPrecisionPolicy(param_dtype=...)",
                entry.unit.name,
            )

    def outdate(self, entry: Entry) -> None:
        """Drop the copy ahead of a stale entry; with ``poison``, a late read of it gives NaN."""
        self._unstage(entry)
        if self._poison:
            self._forget(entry)
            entry.settled = False

    def _take_staged(self, entry: Entry) -> Slice | None:
        staged, entry.staged = entry.staged, None
        self._staged -= staged is not None
        return staged

    def _unstage(self, entry: Entry) -> None:
        if (staged := self._take_staged(entry)) is not None:
            self.staging.release(staged)

    def _preference(self, unit: Unit, *, stored: bool) -> tuple[TierName, ...]:
        """The unit's tiers in order of preference, as memory is now or, of a load, in this pass."""
        preference = self.placement.preferences[unit]
        if "device" not in preference or not self.placement.guarded:
            return preference
        if self.placement.admits(unit, self._usage_now(exact=stored)):
            return preference
        return tuple(tier for tier in preference if tier != "device")

    def _usage_now(self, *, exact: bool) -> Usage:
        """Device memory in use: the driver's figure in this pass, and allocations since then.

        ``exact`` counts all tensors, as activations grow while units are stored. A load counts the
        tier's own alone, which costs the host nothing.
        """
        device, in_tier = self._streams.device, self._device_tier.nbytes
        if self._seen is None:
            self._seen = device_usage(device), allocated_bytes(device), in_tier
        usage, in_tensors_then, in_tier_then = self._seen
        since = in_tier - in_tier_then
        if exact and in_tensors_then is not None:
            since = (allocated_bytes(device) or 0) - in_tensors_then
        return replace(usage, used=usage.used + since)

    def _fill(self, target: Slice, unit: Unit, tier: TierName) -> None:
        """Queue a copy of what a tier holds of a unit."""
        with profiled("cache_load", unit.name):
            self._tiers[tier].load(unit, target)

    def _put(
        self, entry: Entry, source: Slice, phase: Phase, *, preference: Sequence[TierName]
    ) -> None:
        unit, before = entry.unit, entry.tier
        entry.tier = None
        for tier in preference:
            try:
                with profiled("cache_store", unit.name):
                    self._tiers[tier].store(unit, source)
            except TierUnavailable as reason:
                if tier not in self._fallen:
                    self._fallen.add(tier)
                    logger.warning(
                        "%s cache: %s for %s; using the next tier for what does not fit",
                        tier,
                        reason,
                        unit.name,
                    )
                continue
            entry.tier, entry.held = tier, entry.generation
            entry.checksums = self._checksums(source) if self._verify else None
            self._count(unit, tier, phase, inward=True)
            break
        if before is not None and before != entry.tier:
            self._tiers[before].drop(unit)
        self._account()

    def _forget(self, entry: Entry) -> None:
        self._unstage(entry)
        if entry.tier is not None:
            self._tiers[entry.tier].drop(entry.unit)
            entry.tier = None

    def _count(self, unit: Unit, tier: TierName, phase: Phase, *, inward: bool) -> None:
        count = self._nbytes[unit]
        if tier == "disk":
            self._ledger.add("disk", phase, count)
        if tier != "device":
            self._ledger.add("device_to_host" if inward else "host_to_device", phase, count)

    def _account(self) -> None:
        self._ledger.device_cache_bytes = self._device_tier.nbytes
        buffers = self._disk_tier.nbytes if self._disk_tier is not None else 0
        self._ledger.host_cache_bytes = self._host_tier.nbytes + buffers

    def _checksums(self, source: Slice) -> torch.Tensor:
        """One checksum per row of the other nodes, in the order of the current stream."""
        stream = self._streams.current()
        source.access.written_for(stream)
        # As bytes: what is fetched ahead has no other dtype, and sums depend on it.
        rows = [row for run in source.others() for row in run.view(torch.uint8)]
        sums = torch.stack(list(map(checksum, rows)))
        source.access.note_read(stream)
        return sums

"""Placement policies: which tier each unit's entry goes to."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from fcdp.cache.memory import Usage
from fcdp.sizes import in_words
from fcdp.topology import Topology
from fcdp.unit import Unit, entry_size

logger = logging.getLogger("fcdp")

#: Where an entry's bytes are: in the accelerator's memory, in the arena of page-locked host memory,
#: or in a file on a local disk.
TierName = Literal["device", "host", "disk"]
#: Tiers in order of preference; where none can take a unit, it is gathered across nodes.
Preference = tuple[TierName, ...]


class Placement(Protocol):
    """A policy applied to one model."""

    #: Tiers that each unit prefers; the same on every rank, since it decides what is planned.
    preferences: dict[Unit, Preference]
    #: Whether :meth:`admits` is to be asked before the device takes a unit.
    guarded: bool
    #: Whether it is to be asked again at each load, and the entry moved where the answer changes.
    moves: bool

    def admits(self, unit: Unit, usage: Usage) -> bool:
        """Whether the device may take the unit now. Ranks may differ: each has its own device."""
        ...


class CachePolicy(Protocol):
    """A policy is one frozen class; every rank applies it once, to the same units.

    Attributes:
        directory: Folder of the disk tier's file; ``None`` for policies without that tier.

    Example:
        >>> from dataclasses import dataclass
        >>> from fcdp.cache.policy import Fixed
        >>> @dataclass(frozen=True)
        ... class FrozenOnTheDevice:
        ...     directory = None
        ...     def place(self, units, topology):
        ...         tiers = {unit: ("host",) if unit.trainable else ("device",) for unit in units}
        ...         return Fixed(tiers)
        >>> model = fcdp.shard(Net(), topology, policy=FrozenOnTheDevice())
        >>> fcdp.is_cached(model)
        True
    """

    @property
    def directory(self) -> Path | None:
        """Folder of the disk tier's file, for policies that use it."""
        ...

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        """Choose the tiers that each unit prefers.

        Args:
            units: The model's units, in the order of ``named_modules``; each knows its bytes, the
                topology of its own mesh, and how often a step uses it.
            topology: Where the ranks stand.

        Returns:
            The policy applied to these units, the same on every rank.
        """
        ...


@dataclass
class Fixed:
    """A placement that does not look at memory in use."""

    preferences: dict[Unit, Preference]
    guarded = False
    moves = False

    def admits(self, unit: Unit, usage: Usage) -> bool:
        return True


@dataclass(frozen=True)
class NoCache:
    """Gather across nodes every time: ZeRO-3, with this library's hierarchical collectives.

    Example:
        >>> model = fcdp.shard(Net(), topology, policy=fcdp.NoCache())
        >>> fcdp.ledger(model).host_cache_bytes
        0
    """

    directory: ClassVar[None] = None

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        return Fixed(dict.fromkeys(units, ()))


@dataclass(frozen=True)
class DeviceCache:
    """Keep every unit in device memory: ZeRO++'s hpZ, 1/L of the gathered model a device.

    What the device cannot take goes to the host.

    Example:
        >>> model = fcdp.shard(Net(), topology, policy=fcdp.DeviceCache())
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> fcdp.ledger(model).device_cache_bytes > 0
        True
    """

    directory: ClassVar[None] = None

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        return Fixed(dict.fromkeys(units, ("device", "host")))


@dataclass(frozen=True)
class HostCache:
    """Keep every unit in host memory (the paper's FCDP-Cache above its threshold).

    A rank stores what it received from the other nodes: (n−1)/n of its 1/L slice, because its own
    shard is at hand anyway. A node holds (n−1)/n of the gathered model in all.

    Example:
        >>> model = fcdp.shard(Net(), topology, policy=fcdp.HostCache())
        >>> fcdp.ledger(model).host_cache_bytes  # a page per unit, at the least
        8192
    """

    directory: ClassVar[None] = None

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        return Fixed(dict.fromkeys(units, ("host",)))


@dataclass(frozen=True)
class DiskCache:
    """Keep every unit on a local disk, in ``directory``; host memory holds a few units only.

    Args:
        directory: A path of each node's own disk; each rank makes a file in it without a name.

    Raises:
        ValueError: For what is no path.

    Example:
        >>> policy = fcdp.DiskCache(directory)
        >>> model = fcdp.shard(Net(), topology, policy=policy)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> fcdp.ledger(model).total("disk") > 0
        True
    """

    directory: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", _path(self.directory))

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        return Fixed(dict.fromkeys(units, ("disk",)))


@dataclass(frozen=True)
class Threshold:
    """The paper's FCDP-Cache: on the device while its utilisation is below τ, else on the host.

    Utilisation is looked at when a unit is stored. The host arena has room for every unit.

    Args:
        tau: A share of the device's memory, from 0 to 1.

    Raises:
        ValueError: For a τ outside 0 to 1.

    Example:
        >>> fcdp.Threshold(0.8)
        Threshold(tau=0.8)
        >>> fcdp.Threshold(80)
        Traceback (most recent call last):
        ValueError: tau = 80: must be between 0 and 1
    """

    tau: float
    directory: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not _is_number(self.tau) or not 0 <= self.tau <= 1:
            raise ValueError(f"tau = {self.tau!r}: must be between 0 and 1")

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        return _BelowThreshold(dict.fromkeys(units, ("device", "host")), self.tau)


@dataclass
class _BelowThreshold:
    preferences: dict[Unit, Preference]
    tau: float
    guarded = True
    moves = False  # an entry that left would lower the utilisation and be taken back

    def admits(self, unit: Unit, usage: Usage) -> bool:
        return usage.utilisation < self.tau


@dataclass(frozen=True)
class Budget:
    """Fill each tier up to its budget, best uses first.

    A step's order is fixed, so the time that an entry saves is known: each reuse saves the crossing
    of (n−1)/n of a slice, and costs the tier's own copy. Per byte, units that are reused more often
    in a step save most (frozen units: forward and backward); among equals the unit that is reused
    soonest comes first, the last of the forward pass. Device before host before disk; what fits
    nowhere is gathered across nodes.

    Args:
        device: Bytes of each rank's device memory.
        host: Bytes of host memory per rank.
        disk: Bytes of a local disk per rank.
        directory: Where the disk's file goes.

    Raises:
        ValueError: For a budget not a whole number ≥ 0, a disk budget without a ``directory``.

    Example:
        >>> fcdp.Budget(device=2**30, host=4 * 2**30)
        Budget(device=1 GiB, host=4 GiB)
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    directory: Path | None = None

    def __repr__(self) -> str:
        sizes = {"device": self.device, "host": self.host, "disk": self.disk}
        arguments = [f"{name}={in_words(size)}" for name, size in sizes.items() if size]
        if self.directory is not None:
            arguments.append(f"directory={str(self.directory)!r}")
        return f"Budget({', '.join(arguments)})"

    def __post_init__(self) -> None:
        for name in ("device", "host", "disk"):
            size = getattr(self, name)
            if type(size) is not int or size < 0:
                raise ValueError(
                    f"{name} = {size!r}: must be bytes, a whole number, 0 or more; 2**30 for a GiB"
                )
        if self.directory is not None:
            object.__setattr__(self, "directory", _path(self.directory))
        if self.disk and self.directory is None:
            raise ValueError(f"disk = {self.disk}: needs a directory")

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        preferences: dict[Unit, Preference] = dict.fromkeys(units, ())
        left: dict[TierName, int] = {"device": self.device, "host": self.host, "disk": self.disk}
        for unit in _best_first(units):
            size = entry_size(unit)
            for tier in left:
                if unit.reuses and size <= left[tier]:
                    left[tier] -= size
                    preferences[unit] = (tier, "host") if tier == "device" else (tier,)
                    break
        return Fixed(preferences)


@dataclass(frozen=True)
class Auto:
    """Find out how much device memory is left over, and keep units there that are reused soonest.

    Everything goes to the host until each unit was gathered ``measured_gathers`` times. Then the
    device takes what leaves ``reserve`` free at the fullest moment seen; whenever less is free than
    that, the unit at hand goes back to the host for good.

    Args:
        reserve: A share of the device's memory, above 0 and below 1.
        measured_gathers: Gathers of each unit, 0 or more, before the device takes any.

    Raises:
        ValueError: For a ``reserve`` or a count outside of these.

    Example:
        >>> fcdp.Auto()
        Auto(reserve=0.1, measured_gathers=4)
    """

    reserve: float = 0.1
    measured_gathers: int = 4
    directory: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not _is_number(self.reserve) or not 0 < self.reserve < 1:
            raise ValueError(f"reserve = {self.reserve!r}: must be between 0 and 1")
        if type(self.measured_gathers) is not int or self.measured_gathers < 0:
            raise ValueError(
                f"measured_gathers = {self.measured_gathers!r}: must be a count, 0 or more"
            )

    def place(self, units: Sequence[Unit], topology: Topology) -> Placement:
        return _AutoPlacement(
            preferences=dict.fromkeys(units, ("device", "host")),
            best_first=_best_first(units),
            reserve=self.reserve,
            measured_gathers=self.measured_gathers,
        )


@dataclass(kw_only=True)
class _AutoPlacement:
    preferences: dict[Unit, Preference]
    best_first: list[Unit]
    reserve: float
    measured_gathers: int
    guarded = True
    moves = True
    _gathers: Counter[Unit] = field(default_factory=Counter)
    #: Units that the device keeps; ``None`` while measuring.
    _on_device: set[Unit] | None = None

    def admits(self, unit: Unit, usage: Usage) -> bool:
        self._gathers[unit] += 1
        if self._on_device is None:
            if self._gathers[unit] <= self.measured_gathers:
                return False
            self._on_device = self._choose(usage)
        if usage.free < self.reserve * usage.total:
            self._on_device.discard(unit)
        return unit in self._on_device

    def _choose(self, usage: Usage) -> set[Unit]:
        headroom = (1 - self.reserve) * usage.total - usage.peak
        chosen: set[Unit] = set()
        for unit in self.best_first:
            headroom -= entry_size(unit)
            if headroom < 0:
                break
            chosen.add(unit)
        logger.info(
            "auto cache: %d of %d units stay on the device", len(chosen), len(self.best_first)
        )
        return chosen


def _best_first(units: Sequence[Unit]) -> list[Unit]:
    """Most reused first, then soonest reused: backward meets the last unit of forward first."""
    return sorted(units, key=lambda unit: unit.reuses)[::-1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _path(directory: Any) -> Path:
    """Return ``directory`` as a path. Raises ``ValueError`` for what is neither path nor text."""
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory = {directory!r}: must be a path")
    return Path(directory)

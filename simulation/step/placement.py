"""Which tier each unit's entry is in, in a steady step, as the library's own policies decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baselines.schedule import Place, Schedule
from simulation.hardware import Hardware
from simulation.memory import CacheBytes, entry_bytes, footprint
from simulation.units import Layout, Unit
from simulation.workload import Workload

if TYPE_CHECKING:
    from fcdp.cache.memory import Usage

#: Gathers after which every policy of the library has settled.
_SETTLED = 6
#: Policies that put every unit into one tier: what they decide is known without torch.
_ONE_TIER: Mapping[str, Place | None] = {
    "none": None,
    "device": "device",
    "host": "host",
    "disk": "disk",
}


@dataclass(frozen=True)
class Placement:
    """The tier of each unit's entry, and what the entries take of a rank's memory."""

    tiers: Mapping[Unit, Place]
    cache: CacheBytes


@dataclass(frozen=True, eq=False)
class _PolicyUnit:
    """A unit as ``fcdp.cache.policy`` looks at it."""

    name: str
    shard_bytes: int
    shard_numel: int
    trainable: bool
    reuses: int


def place(workload: Workload, schedule: Schedule, units: Layout, hardware: Hardware) -> Placement:
    """Place the units' entries as the strategy or its policy does.

    Raises ``ValueError`` for a policy that ``fcdp.cache.named`` does not know.
    """
    if schedule.cache is None or hardware.nodes == 1:
        return Placement({}, CacheBytes())
    if schedule.cache != "policy":
        whole = entry_bytes(workload, schedule, hardware)
        cache = CacheBytes(**{schedule.cache: whole})
        return Placement(dict.fromkeys(units.units, schedule.cache), cache)
    return _by_policy(schedule.policy or workload.policy, workload, schedule, units, hardware)


def check_policy(text: str) -> None:
    """Raise ``ValueError`` for a policy that the library does not know."""
    if text not in _ONE_TIER:
        from fcdp.cache.named import parse  # needs torch

        parse(text)


def shard_numel(parameters: int, world_size: int) -> int:
    """Elements of one rank's shard, padding included."""
    return -(-parameters // world_size)


def _by_policy(
    text: str, workload: Workload, schedule: Schedule, units: Layout, hardware: Hardware
) -> Placement:
    if text in _ONE_TIER:
        return _in_one_tier(_ONE_TIER[text], workload, units, hardware)
    from fcdp.cache.named import parse  # needs torch

    seen: dict[Unit, Any] = {}
    for unit in units.units:
        numel = shard_numel(unit.gathered, hardware.world_size)
        frozen = unit.trained == 0
        seen[unit] = _PolicyUnit(
            unit.name, workload.element_bytes * numel, numel, not frozen, (not unit.kept) + frozen
        )
    decided: Any = parse(text).place(list(seen.values()), hardware)  # type: ignore[arg-type]
    tiers: dict[Unit, Place] = {}
    for unit, policy_unit in seen.items():
        for tier in decided.preferences[policy_unit][:1]:
            tiers[unit] = tier
    if decided.guarded:
        tiers = _by_usage(decided, seen, tiers, workload, schedule, units, hardware)
    sizes: dict[str, float] = {"device": 0.0, "host": 0.0, "disk": 0.0}
    for unit, policy_unit in seen.items():
        size = (hardware.nodes - 1) * policy_unit.shard_bytes
        if unit in tiers:
            sizes[tiers[unit]] += size
        if decided.guarded and tiers.get(unit) == "device":
            sizes["host"] += size  # the arena has room for every unit
    return Placement(tiers, CacheBytes(**sizes))


def _in_one_tier(
    tier: Place | None, workload: Workload, units: Layout, hardware: Hardware
) -> Placement:
    if tier is None:
        return Placement({}, CacheBytes())
    each = (shard_numel(unit.gathered, hardware.world_size) for unit in units.units)
    size = float((hardware.nodes - 1) * workload.element_bytes * sum(each))
    return Placement(dict.fromkeys(units.units, tier), CacheBytes(**{tier: size}))


def _by_usage(
    decided: Any,
    seen: Mapping[Unit, _PolicyUnit],
    tiers: Mapping[Unit, Place],
    workload: Workload,
    schedule: Schedule,
    units: Layout,
    hardware: Hardware,
) -> dict[Unit, Place]:
    """Ask the policy as each unit is stored in forward, when activations have piled up so far."""
    most = footprint(workload, schedule, units, hardware, CacheBytes())
    activations = most.forward["activations"]
    rest = sum(most.forward.values()) - activations
    found: dict[Unit, Place] = dict(tiers)
    held: dict[Unit, float] = {}
    for _ in range(_SETTLED):
        for index, (unit, policy_unit) in enumerate(seen.items()):
            used = rest + activations * index / len(seen) + sum(held.values())
            usage = _usage(used, most.device_bytes + sum(held.values()), hardware)
            on_device = decided.admits(policy_unit, usage)
            found[unit] = "device" if on_device else "host"
            held.pop(unit, None)
            if on_device:
                held[unit] = (hardware.nodes - 1) * policy_unit.shard_bytes
        if not decided.moves:
            break
    return found


def _usage(used: float, peak: float, hardware: Hardware) -> Usage:
    from fcdp.cache.memory import Usage

    # The reserve is used by others than tensors.
    total = round(hardware.device.memory_bytes)
    reserve = hardware.device_reserve_bytes
    return Usage(min(round(used + reserve), total), min(round(peak + reserve), total), total)

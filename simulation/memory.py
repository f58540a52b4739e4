"""Peak memory of a rank's device, a node's host and its disks, for each strategy, in bytes.

Parts are counted as the code has them: sharded as FSDP2 and DeepSpeed shard them, the cache with
what docs/memory.md says, in the tiers that the library's own policies decide. A test compares whole
peaks with those of real steps, in results/memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

from baselines.pipeline.order import InFlight
from baselines.schedule import Place, Schedule
from fcdp import grouping
from fcdp.grouping import PartialsPlace
from simulation import cycle
from simulation.cycle import Held
from simulation.hardware import Hardware
from simulation.units import Layout, Unit, shard_numel
from simulation.workload import (
    FP32,
    States,
    Workload,
    block_bytes,
    checkpointed_bytes,
    loss_bytes,
    output_bytes,
)

_MOMENTS_BYTES: Mapping[States, int] = {"fp32": 8, "bf16": 4, "int8": 2}
#: Workers that step apart keep what a round began with, the outer momentum and what is exchanged.
_OUTER_BYTES = 12
#: While foreach AdamW steps: square roots of the second moments of all its parameters.
_STEP_BYTES = 4
#: DeepSpeed's ``sub_group_size``: elements of a rank that it gives AdamW at a time, with gradients
#: that it copies to fp32 for this.
_SUB_GROUP = 1e9
#: Gathered units beside the root: one in use, one on its way.
_GATHERED_UNITS = 2
_PREFETCH_DEPTH = 1
#: Gathers after which every policy of the library has settled.
_SETTLED = 6
_TIERS: Sequence[Place] = get_args(Place)
#: Placements in the cache: enough for all strategies on several clusters.
_REMEMBERED = 256
#: Policies that put every unit into one tier: what they decide is known without torch.
ONE_TIER: Mapping[str, Place | None] = {"none": None} | {tier: tier for tier in _TIERS}
#: Bytes of the entries of one rank's cache by tier, and of the host memory that the entries on the
#: disk pass through.
CacheBytes = Mapping[Place | Literal["buffers"], float]
Tiers = Mapping[Unit, Place]


@dataclass(frozen=True)
class Shortfall:
    """Memory that a workload lacks; both are 0 where it fits."""

    #: Bytes on each device.
    device_bytes: float
    #: Bytes on each node's host.
    host_bytes: float

    @property
    def fits(self) -> bool:
        return self.device_bytes == 0 == self.host_bytes

    def of_node(self, ranks_per_node: int) -> float:
        """Bytes that a node lacks, on its devices and its host together."""
        return ranks_per_node * self.device_bytes + self.host_bytes


@dataclass(frozen=True)
class Footprint:
    """Bytes that a step needs at its fullest moment, by part."""

    #: Memory of one rank's device.
    device: Mapping[str, float]
    #: Memory of one rank's device in forward, when all blocks have run.
    forward: Mapping[str, float]
    #: One node's host memory, for what this project or a vendor puts there.
    host: Mapping[str, float]
    #: Space on one node's disks.
    disk: Mapping[str, float]
    #: Memory of one rank's device while another of its stages computes, of a pipeline's stage.
    waiting: Mapping[str, float] = field(default_factory=dict)
    #: Memory of one rank's device in the optimizer's step.
    stepping: Mapping[str, float] = field(default_factory=dict)

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    def lacks(self, hardware: Hardware) -> Shortfall:
        """The memory that is missing on this hardware."""
        return Shortfall(
            max(0.0, self.device_bytes - hardware.usable_device_bytes),
            max(0.0, self.host_bytes - hardware.host_memory_bytes),
        )

    def shortage(self, hardware: Hardware) -> str | None:
        """A sentence about what does not fit, with needs and haves in GB; ``None`` if all fits."""
        most = max(self.device, key=lambda part: self.device[part], default="nothing")
        for what, needs, has, more in (
            ("a device", self.device_bytes, hardware.usable_device_bytes, f" (most: {most})"),
            ("a node's host", self.host_bytes, hardware.host_memory_bytes, ""),
        ):
            if needs > has:
                return f"{what} needs {needs / 1e9:.1f} GB, has {has / 1e9:.1f}{more}"
        return None


def footprint(
    workload: Workload,
    units: Layout,
    hardware: Hardware,
    cache: CacheBytes,
    in_flight: InFlight | None = None,
    received: float = 0.0,
) -> Footprint:
    """The peak memory of a steady step with a cache of these bytes.

    Of a pipeline's stage: ``in_flight`` are the most micro-batches that it has at once, and
    ``received`` the bytes of its buffers for messages.
    """
    nodes, ranks = hardware.shape
    schedule, element = workload.schedule, workload.element_bytes
    held = _held(workload, hardware)
    if in_flight is not None:
        held = held._replace(in_flight=in_flight.activations)
    on_device = schedule.optimizer == "device"
    places: dict[str, dict[str, float]] = {"device": {}, "host": {}, "disk": {}}
    device, host, disk = places.values()
    for name, nbytes, place in (
        ("parameters", held.parameters, schedule.parameters),
        ("scales", workload.frozen_scale_bytes, "device"),
        ("gradients", held.gradients, "device" if on_device else "host"),
        ("optimizer states", held.states, schedule.optimizer),
        ("optimizer step", held.step, "device" if on_device else "host"),
        ("outer state", held.outer, workload.outer_on),
        ("versions", held.versions, "device"),
        ("messages", held.messages, "host"),
        ("received", received, "device"),
    ):
        places[place][name] = nbytes * (1 if place == "device" else ranks)
    largest_slice = (nodes - 1) / nodes * element * units.largest / ranks
    device["cache"], disk["cache"] = cache.get("device", 0.0), ranks * cache.get("disk", 0.0)
    host["cache"] = ranks * (cache.get("host", 0.0) + cache.get("buffers", 0.0))
    on_host = FP32 * workload.trained
    free_on_host = hardware.host_memory_bytes - sum(host.values())
    sums = _sums_place(workload, hardware, held.parameters, host_fits=on_host <= free_on_host)
    if sums == "host":
        host["gradient sums"] = on_host
    gradients, step = device.pop("gradients", 0.0), device.pop("optimizer step", 0.0)
    slices = _slices(schedule, cache, nodes, largest_slice)
    due = 0 if in_flight is None else in_flight.gradients
    moments = _moments(workload, units, ranks, gradients, step, slices, held.in_flight, due, sums)
    if hardware.world_size == 1 and workload.states != "fp32":  # computed with as they are stored
        for moment in moments:
            moment.pop("gathered", None)
    *own, between = moments
    _, forward, *_, stepping = own
    fullest = max(own, key=lambda moment: sum(moment.values()))
    # Between its passes a stage waits, or after its last one, with its gradients.
    waiting = max(between, {"gradients": gradients}, key=lambda moment: sum(moment.values()))
    return Footprint(
        device=_positive(device | fullest),
        forward=_positive(device | forward),
        host=_positive(host),
        disk=_positive(disk),
        waiting=_positive(device | waiting),
        stepping=_positive(device | stepping),
    )


def _sums_place(
    workload: Workload, hardware: Hardware, shards: float, *, host_fits: bool
) -> PartialsPlace | None:
    """Where sums of micro-batches' gradients wait for the last one; ``None``: there are none.

    With ``auto`` the library's own rule says it. What is free on a device at set-up is all but the
    bytes of a rank's ``shards``, if they are there.
    """
    schedule = workload.schedule
    if workload.accumulation == 1 or not schedule.accumulates_without_sync:
        return None
    if schedule.shards != "world":
        return "device" if schedule.optimizer != "device" else None
    choice = schedule.partial_gradients
    assert choice != "each", "each micro-batch's gradients cross nodes: none accumulate"
    if choice != "auto":
        return choice
    if hardware.nodes == 1 or hardware.backend == "gloo" or not host_fits:
        return "device"
    free = hardware.usable_device_bytes - (shards if schedule.parameters == "device" else 0.0)
    fits = grouping.sums_fit(FP32 * workload.trained / hardware.ranks_per_node, free)
    return "device" if fits else "host"


def sum_bytes(workload: Workload, hardware: Hardware) -> float:
    """Bytes of a rank's gradients to which those of a further micro-batch are added on its device.

    They are partial sums, where a strategy keeps these beside its gradients; else the gradients of
    its own shard, or of all parameters. None where an optimizer on the host adds them up.
    """
    schedule = workload.schedule
    if schedule.cycle == "turns":  # which holds gradients of the next step, too
        return float(FP32 * workload.trained)
    on_device = schedule.optimizer == "device"
    if schedule.accumulates_without_sync and (schedule.shards == "world" or not on_device):
        return _partial_bytes(workload, hardware.ranks_per_node)
    return _held(workload, hardware).gradients if on_device else 0.0


def _partial_bytes(workload: Workload, ranks_per_node: int) -> float:
    """Bytes of a rank's partial sums of all gradients."""
    sharers = 1 if workload.schedule.gathered_for == "step" else ranks_per_node
    return _partial_width(workload) * workload.trained / sharers


def _partial_width(workload: Workload) -> int:
    """Bytes of an element of partial sums."""
    return FP32 if workload.schedule.shards == "world" else workload.reduced_bytes


def activations(workload: Workload) -> tuple[float, float, float, float]:
    """Bytes of activations: of one block, saved by all, recomputed for one, after the blocks.

    Those after the blocks are there when the loss is differentiated.
    """
    model, tokens = workload.model, workload.tokens
    again = workload.recomputed
    block = max(tokens * block_bytes(part) for part in workload.parts)
    saved = workload.total(
        lambda each: (
            again * (tokens * checkpointed_bytes(each)) + (1 - again) * (tokens * block_bytes(each))
        )
    )
    # The last norm's input and, for the gradient of the output matrix, its output.
    entries = (2 if workload.lora is None else 1) * tokens * workload.element_bytes * model.width
    output = entries + tokens * loss_bytes(workload) * model.vocabulary
    return block, saved, block if again else 0.0, output


def _held(workload: Workload, hardware: Hardware) -> Held:
    """Memory that a rank keeps from step to step, and that its optimizer takes."""
    schedule = workload.schedule
    if schedule.cycle is not None:
        return cycle.held(workload, hardware.world_size)
    sharers = schedule.sharers(*hardware.shape)
    # FSDP2 shards fp32 parameters and gathers them in bf16; DeepSpeed shards bf16 beside a master.
    fp32 = workload.states == "fp32"
    stored = workload.sharded_bytes
    master = FP32 if stored < FP32 and fp32 else 0
    moments = _MOMENTS_BYTES[workload.states]
    stepped, whole = workload.trained / sharers, workload.parameters / sharers
    frozen = 0.0 if workload.lora is None else workload.frozen_sharded_bytes
    element = workload.element_bytes
    if not fp32:  # a fused step keeps no square roots; gradients have the parameters' dtype
        gradients, step = stored * stepped, 0.0
    elif schedule.shards_fp32:
        gradients, step = FP32 * stepped, _STEP_BYTES * stepped
    elif schedule.optimizer == "device":
        in_fp32 = (FP32 + _STEP_BYTES) * min(stepped, _SUB_GROUP)
        gradients, step = element * stepped, in_fp32
    else:  # on the host all gradients are there in fp32 too, and its own Adam steps in place
        gradients, step = (element + FP32) * stepped, 0.0
    return Held(
        stored * stepped + frozen * (whole - stepped),
        gradients,
        (moments + master) * stepped,
        step,
        outer=_OUTER_BYTES * stepped if schedule.averages else 0.0,
    )


def _slices(
    schedule: Schedule, cache: CacheBytes, nodes: int, largest: float
) -> tuple[float, float, float]:
    """Bytes of the slices of our gathers on a device: in forward, at the loss and in backward.

    ``largest`` are those of the largest slice in the cache: a unit's parts of other nodes. Across
    nodes one whole slice is filled while the one before it is read. From the cache one is read, and
    what the host keeps is fetched ahead, the first as forward ends. Those of forward are let go
    when the loss is differentiated, and all before the optimizer steps.
    """
    if not schedule.stages or nodes == 1:
        return 0.0, 0.0, 0.0
    across = 2 * nodes / (nodes - 1) * largest if schedule.hierarchical else 0.0
    if not any(cache.values()):
        return across, across, across
    ahead = (_PREFETCH_DEPTH if cache.get("host") else 0) * largest
    return across, across + ahead, ahead + largest


def _moments(
    workload: Workload,
    units: Layout,
    ranks: int,
    gradients: float,
    step: float,
    slices: tuple[float, float, float],
    in_flight: float,
    due: int,
    sums: PartialsPlace | None,
) -> Sequence[dict[str, float]]:
    """Bytes by part of what comes and goes on a device, at seven moments of a step.

    They are: as forward begins, as its blocks have run, as the loss is differentiated, in the last
    block's backward, in the first's, in the optimizer's step, and, of a pipeline's stage, between
    its passes.

    Parts make room for one another: gradients come as activations go, unless earlier micro-batches
    have left theirs, and what the ``step`` takes comes when all but gradients has gone. Where
    ``in_flight`` micro-batches take turns, activations of all but one are there at each moment, and
    gradients of activations of those that are ``due``, the last of which have come by the end of
    their backward.
    """
    model, tokens, element = workload.model, workload.tokens, workload.element_bytes
    schedule, full = workload.schedule, workload.lora is None
    block, saved, recomputed, output = activations(workload)
    # Gradients inside the MLP; where it is trained, its last matrix's input has gone by then.
    inner = (2 if full else 3) * tokens * element * model.inner

    unit = float(element * units.largest)
    root = float(element * units.root.parameters)
    if schedule.replicates_small:
        root += element * units.replicated
    trained = max((unit.trained for unit in units.units if unit is not units.root), default=0)
    reductions = float(workload.reduced_bytes * (units.root.trained + 2 * trained))
    # At backward's end: gradients of what is replicated, copied to bf16 and then put together; and
    # what FSDP2 has all-reduced across nodes, which it keeps until then.
    last = float(2 * element * units.replicated_trained)
    if schedule.shards == "node" and schedule.copies_out:
        last += element * workload.trained / ranks
    if schedule.shards == "rank" or schedule.cycle is not None:
        # Autocast's bf16 copies of fp32 weights, one per graph. DDP's buckets are the gradients.
        root = in_flight * (element * _cast(workload) if element < FP32 else 0)
        reductions = unit = 0.0
    # FSDP2 copies parameters out of a gather's buffer, which stays until the next gather.
    copied_root, copied = (schedule.copies_out * of for of in (root, unit))
    if schedule.gathered_for == "step":
        root, unit = float(element * workload.parameters), 0.0
    gathered = root + _GATHERED_UNITS * unit

    stay = schedule.keeps_gradients or workload.accumulation > 1
    left = {"gradients": gradients if stay else 0.0}
    # Partial gradients, which FSDP2 keeps as it reduces them; committed records have this name.
    if sums == "device":
        left["gradient sums"] = _partial_bytes(workload, ranks)
    in_forward, at_loss, in_backward = slices
    in_block = left | {"gathered": gathered, "reductions": reductions, "slices": in_backward}
    if sums == "host":  # two staging buffers, and the sum that crosses nodes
        largest = max(trained, units.root.trained)
        in_block["gradient sums"] = 3 * _partial_width(workload) * largest / ranks
    moments = (
        left | {"gathered": gathered + copied_root, "slices": in_forward},
        left | {"gathered": gathered + copied, "slices": in_forward, "activations": saved},
        left | {"gathered": root, "slices": at_loss, "activations": saved + output},
        in_block | {"activations": saved + recomputed + inner},
        in_block
        | {"activations": block + inner, "reductions": reductions + last, "gradients": gradients},
        {"gradients": gradients, "optimizer step": step},
        left | {"gathered": root, "activations": saved},
    )
    others, each_due = (in_flight - 1) * saved, tokens * output_bytes(workload) if due else 0.0
    # A pipeline's last micro-batch is alone when its gradients are reduced.
    alone = 2 if schedule.cut else 0
    beside = [others + each_due * (due - 1)] * (len(moments) - 2 - alone)
    beside += [others + each_due * due, *[0.0] * alone, others + each_due * due]
    return [
        m | {"activations": m.get("activations", 0.0) + more}
        for m, more in zip(moments, beside, strict=True)
    ]


def _cast(workload: Workload) -> int:
    """Count the parameters that a replica has copies of while it computes.

    Frozen parameters in bf16 have none, and packed ones are unpacked matrix by matrix.
    """
    trained = workload.trained if workload.states == "fp32" else 0
    if workload.lora is None or workload.frozen_dtype == "fp32":
        return trained + workload.frozen
    if workload.frozen_dtype == "bf16":
        return trained
    return trained + max(matrix.size for matrix in workload.model.matrices)


def _positive(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


@dataclass(frozen=True, eq=False)
class _PolicyUnit:
    """A unit as ``fcdp.cache.policy`` sees it."""

    name: str
    shard_bytes: int
    shard_numel: int
    trainable: bool
    reuses: int
    #: The nodes that it is on: all.
    topology: Hardware


def place(workload: Workload, units: Layout, hardware: Hardware) -> tuple[Tiers, CacheBytes]:
    """The tier of each unit's entry, and what they take, as the strategy or its policy places them.

    Raises ``ValueError`` for a policy that ``fcdp.cache.named`` does not know.
    """
    schedule = workload.schedule
    if schedule.cache is None or hardware.nodes == 1:
        return {}, {}
    if schedule.cache != "policy":
        whole = workload.parameters * workload.element_bytes / hardware.ranks_per_node
        if not schedule.caches_own_shard:
            whole *= (hardware.nodes - 1) / hardware.nodes
        return dict.fromkeys(units.units, schedule.cache), {schedule.cache: whole}
    return _by_policy(schedule.policy or workload.policy, workload, units, hardware)


def check_policy(text: str) -> None:
    """Raise ``ValueError`` for a policy that the library does not know."""
    if text not in ONE_TIER:
        from fcdp.cache.named import parse  # needs torch

        parse(text)


def _by_policy(
    text: str, workload: Workload, units: Layout, hardware: Hardware
) -> tuple[Tiers, CacheBytes]:
    elements = float(workload.element_bytes), workload.frozen_gathered_bytes
    if text in ONE_TIER:
        return _in_one_tier(units, ONE_TIER[text], elements, hardware.nodes, hardware.world_size)
    from fcdp.cache.named import parse  # needs torch

    shards = _shard_bytes(units, elements, hardware.world_size)
    seen: dict[Unit, Any] = {}
    for unit, nbytes in shards.items():
        numel = shard_numel(unit.gathered, hardware.world_size)
        trained = unit.trained > 0
        seen[unit] = _PolicyUnit(unit.name, nbytes, numel, trained, unit.reuses, hardware)
    decided: Any = parse(text).place(list(seen.values()), hardware)  # type: ignore[arg-type]
    if decided.guarded:
        tiers = _by_usage(decided, seen, workload, units, hardware)
    else:
        preferred = ((unit, decided.preferences[of]) for unit, of in seen.items())
        tiers = {unit: order[0] for unit, order in preferred if order}
    sizes = _sizes(tiers, shards, hardware.nodes)
    if decided.guarded:
        sizes["host"] += sizes["device"]  # the arena has room for every unit
    return tiers, sizes


@lru_cache(maxsize=_REMEMBERED)
def _in_one_tier(
    units: Layout, tier: Place | None, elements: tuple[float, float], nodes: int, world_size: int
) -> tuple[Tiers, CacheBytes]:
    """Tiers and sizes, which many points of a search have in common."""
    tiers = {} if tier is None else dict.fromkeys(units.units, tier)
    return tiers, _sizes(tiers, _shard_bytes(units, elements, world_size), nodes)


def _shard_bytes(units: Layout, elements: tuple[float, float], world_size: int) -> dict[Unit, int]:
    """Bytes of a rank's part of each unit, by those of a trained and of a frozen parameter."""
    return {
        unit: math.ceil(shard_numel(unit.gathered, world_size) * elements[unit.trained == 0])
        for unit in units.units
    }


def _sizes(
    tiers: Tiers, shards: Mapping[Unit, int], nodes: int
) -> dict[Place | Literal["buffers"], float]:
    """Bytes of one rank's entries by tier, and of what those on the disk pass through."""
    sizes: dict[Place | Literal["buffers"], float] = dict.fromkeys(_TIERS, 0.0)
    entries = {unit: grouping.entry_bytes(shards[unit], nodes) for unit in tiers}
    for unit, tier in tiers.items():
        sizes[tier] += entries[unit]
    on_disk = (entries[unit] for unit, tier in tiers.items() if tier == "disk")
    sizes["buffers"] = grouping.disk_buffers(_PREFETCH_DEPTH) * max(on_disk, default=0)
    return sizes


def _by_usage(
    decided: Any,
    seen: Mapping[Unit, _PolicyUnit],
    workload: Workload,
    units: Layout,
    hardware: Hardware,
) -> dict[Unit, Place]:
    """Ask the policy as each unit is stored in forward, with the activations up to there."""
    from fcdp.cache.memory import Usage  # needs torch

    # The reserve is in use too, but not by tensors.
    reserve, total = hardware.device_reserve_bytes, round(hardware.device.memory_bytes)
    most = footprint(workload, units, hardware, {})
    activations = most.forward["activations"]
    rest = sum(most.forward.values()) - activations
    places: dict[Unit, Place] = {}
    held: dict[Unit, float] = {}
    for _ in range(_SETTLED):
        for index, (unit, policy_unit) in enumerate(seen.items()):
            now = rest + activations * index / len(seen) + sum(held.values())
            peak = most.device_bytes + sum(held.values())
            used, fullest = (min(round(nbytes + reserve), total) for nbytes in (now, peak))
            on_device = decided.admits(policy_unit, Usage(used, fullest, total))
            places[unit] = "device" if on_device else "host"
            held.pop(unit, None)
            if on_device:
                held[unit] = grouping.entry_bytes(policy_unit.shard_bytes, hardware.nodes)
        if not decided.moves:
            break
    return places

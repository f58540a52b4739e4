"""Peak memory of a rank's device, a node's host and its disks, for each strategy, in bytes.

What each part takes follows the code: FSDP2 and DeepSpeed shard what they shard, the cache holds
what docs/memory.md says. Activations are what the layers of ``transformers`` keep for backward,
counted by hand; a test compares them with real modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from experiments.costs.hardware import Hardware
from experiments.costs.strategies import Scheme, scheme
from experiments.costs.units import Layout, layout
from experiments.costs.workload import Workload

_MASTER_BYTES = 4
_MOMENTS_BYTES = 8
#: Of a token in the output layer, beside the logits: their log-softmax and its gradient in fp32.
_LOSS_BYTES = 8
#: Gathered units other than the root's: one in use, one on its way.
_GATHERED_UNITS = 2
_LOOK_AHEAD = 1


@dataclass(frozen=True)
class CacheBytes:
    """What the entries of one rank's cache take."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True)
class Footprint:
    """What a step needs at its fullest moment, by part."""

    #: One rank's device.
    device: Mapping[str, float]
    #: One node's host memory, for what this project or a vendor puts there.
    host: Mapping[str, float]
    #: One node's disks.
    disk: Mapping[str, float]

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())

    def shortage(self, hardware: Hardware) -> str | None:
        """What does not fit, with what it needs and has; ``None`` if all fits."""
        if self.device_bytes > hardware.usable_device_bytes:
            return (
                f"a device needs {self.device_bytes / 1e9:.1f} GB, has "
                f"{hardware.usable_device_bytes / 1e9:.1f} "
                f"(most: {max(self.device, key=lambda part: self.device[part])})"
            )
        if self.host_bytes > hardware.host_memory_bytes:
            return (
                f"a node's host needs {self.host_bytes / 1e9:.1f} GB, has "
                f"{hardware.host_memory_bytes / 1e9:.1f}"
            )
        return None


def peak(workload: Workload, hardware: Hardware) -> Footprint:
    """The peak of a steady step.

    The cache is planned as if every unit went to the first tier of its strategy; a policy that
    looks at memory in use is applied by the simulator, which calls ``footprint``.
    """
    plan = scheme(workload.strategy)
    units = layout(workload, plan, hardware.nodes, hardware.ranks_per_node)
    policy = plan.policy or workload.policy
    entries = entry_bytes(workload, plan, hardware)
    place = policy if plan.cache == "policy" else plan.cache
    cache = CacheBytes(
        device=entries if place == "device" else 0.0,
        host=entries if place in ("host", "auto") or str(place).startswith("threshold") else 0.0,
        disk=entries if place == "disk" else 0.0,
    )
    return footprint(workload, plan, units, hardware, cache)


def entry_bytes(workload: Workload, plan: Scheme, hardware: Hardware) -> float:
    """Of one rank, all entries: our cache leaves out the rank's own shard, vendors do not."""
    nodes, ranks = hardware.nodes, hardware.ranks_per_node
    gathered = workload.parameters * workload.element_bytes
    if plan.engine == "fcdp":
        return (nodes - 1) / nodes * gathered / ranks
    return gathered / ranks


def footprint(
    workload: Workload, plan: Scheme, units: Layout, hardware: Hardware, cache: CacheBytes
) -> Footprint:
    """The peak with what the cache holds given."""
    nodes, ranks = hardware.nodes, hardware.ranks_per_node
    sharers = {"world": hardware.world_size, "node": ranks, "rank": 1}[plan.shards]
    deepspeed = plan.engine == "deepspeed"
    element = workload.element_bytes
    # FSDP2 shards fp32 parameters and gathers them in bf16; DeepSpeed shards bf16 beside a master.
    stored = element if deepspeed else _MASTER_BYTES
    master = _MASTER_BYTES if deepspeed and element < _MASTER_BYTES else 0
    parameters = stored * workload.parameters / sharers
    gradients = _MASTER_BYTES * workload.trained / sharers
    states = (_MOMENTS_BYTES + master) * workload.trained / sharers
    device: dict[str, float] = {}
    host: dict[str, float] = {}
    disk: dict[str, float] = {}
    places = {"device": device, "host": host, "disk": disk}
    for name, nbytes, place in (
        ("parameters", parameters, plan.parameters),
        ("gradients", gradients, "device" if plan.optimizer == "device" else "host"),
        ("optimizer states", states, plan.optimizer),
    ):
        places[place][name] = nbytes * (1 if place == "device" else ranks)
    device["gathered"] = element * (
        units.root.parameters + units.whole + _GATHERED_UNITS * units.largest
    )
    if plan.shards == "rank":
        # Autocast's bf16 copies of all weights, and DDP's buckets, which are the gradients.
        device["gathered"] = element * workload.parameters if element < _MASTER_BYTES else 0
    device |= _fullest_moment(workload, plan, units, device.pop("gradients", 0.0))
    if plan.shards == "world" and plan.defers and workload.accumulation > 1:
        device["gradient sums"] = _MASTER_BYTES * workload.trained / ranks
    largest_slice = (nodes - 1) / nodes * element * units.largest / ranks
    if cache.host and plan.engine == "fcdp":
        device["staging"] = _LOOK_AHEAD * largest_slice
    device["cache"], disk["cache"] = cache.device, ranks * cache.disk
    buffers = (_LOOK_AHEAD + 2) * largest_slice if cache.disk else 0.0
    host["cache"] = ranks * (cache.host + buffers)
    return Footprint(_positive(device), _positive(host), _positive(disk))


def largest_micro_batch(
    workload: Workload,
    hardware: Hardware,
    fits: Callable[[Workload], bool] | None = None,
) -> int:
    """Most sequences a rank and micro-batch that fit; 0 if not even one does.

    ``fits`` is asked instead of ``peak`` where a policy decides by memory in use.
    """

    def _fits(micro_batch: int) -> bool:
        tried = replace(workload, micro_batch=micro_batch)
        if fits is not None:
            return fits(tried)
        return peak(tried, hardware).shortage(hardware) is None

    if not _fits(1):
        return 0
    low, high = 1, 2
    while _fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(middle) else (low, middle)
    return low


def block_activation_bytes(workload: Workload) -> float:
    """Of one token in one block, kept from forward to backward where nothing is recomputed.

    GPT-2: norms' and matrices' inputs, Q, K, V, attention's output, and five tensors of the MLP's
    width, as its approximate GELU is written out. Llama: norms work in fp32. What is
    frozen does not keep its input unless adapters need it.
    """
    model, lora = workload.model, workload.lora
    width, inner, element = model.width, model.mlp_width, workload.element_bytes
    if model.family == "gpt2":
        if lora is None:
            return element * (8 * width + 5 * inner)
        return element * (7 * width + 4 * inner)
    narrow = width * model.key_value_heads // model.heads
    norms = 2 * _MASTER_BYTES * width
    attention = element * (3 * width + 2 * narrow)
    if lora is None:
        return norms + attention + element * (3 * width + 4 * inner)
    return norms + attention + element * 3 * inner


def _fullest_moment(
    workload: Workload, plan: Scheme, units: Layout, gradients: float
) -> dict[str, float]:
    """Activations, reductions and gradients of a backward, when they take most together.

    They make room for one another: activations are most at the output layer, gradients when the
    first block has run, unless earlier micro-batches have left theirs.
    """
    model, tokens, element = workload.model, workload.tokens, workload.element_bytes
    block = tokens * block_activation_bytes(workload)
    entry = tokens * element * model.width
    kept = model.layers * (workload.recomputed * entry + (1 - workload.recomputed) * block)
    again = block if workload.recomputed else 0.0
    loss = tokens * (element + _LOSS_BYTES) * model.vocabulary
    unit = max((unit.trained for unit in units.units if unit is not units.root), default=0)
    reductions = float(element * (units.root.trained + units.whole_trained + 2 * unit))
    if plan.shards == "rank":
        reductions = 0.0
    left = gradients if workload.accumulation > 1 or plan.shards == "rank" else 0.0
    moments = (
        {"activations": kept + loss, "reductions": 0.0, "gradients": left},
        {"activations": kept + again, "reductions": reductions, "gradients": left},
        {"activations": block, "reductions": reductions, "gradients": gradients},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def _positive(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: nbytes for name, nbytes in parts.items() if nbytes}

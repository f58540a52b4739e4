"""Latency and bandwidth of exchanges, and the exchanges of a unit's gathers and reductions.

``nbytes`` is always the whole buffer: an all-gather's output, a reduce-scatter's input. A
flat ring over all ranks has one edge out of each node, over which all but one rank's part passes;
a hierarchy sends across nodes only what a node does not have. Each all-gather has its mirror image
in a reduce-scatter of the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import add

from baselines import registry
from baselines.encoding import DIFFERENCES, EXPONENTS, encoded_bytes
from baselines.schedule import Schedule
from simulation.hardware import Hardware
from simulation.units import Unit, shard_numel
from simulation.workload import FP32, Workload

#: Bits per bf16 parameter by learning rate of AdamW, as the kernel's counters saw them in
#: ``results/delta`` (emulated); ``tests/docs/test_figures.py`` holds them against it.
MEASURED: Sequence[tuple[float, float]] = (
    (1e-6, 0.42),
    (1e-5, 1.3),
    (3e-5, 2.1),
    (1e-4, 2.9),
    (1e-3, 5.1),
)
#: Bits of a bf16 gradient that is coded by its exponent, of a small model that has begun to learn.
_BY_EXPONENT = 11.0
#: Bits of a bf16 parameter; the further bits of wider ones are sent as they are.
_BF16_BITS = 16


@dataclass(frozen=True)
class Traffic:
    """Bytes that one exchange sends, and its messages one after the other."""

    #: Bytes out of the busiest node, all its ranks together.
    inter_node_bytes: float = 0.0
    #: Bytes inside a node, of all its ranks together and of the rank that sends most.
    intra_node_bytes: float = 0.0
    intra_rank_bytes: float = 0.0
    inter_messages: float = 0
    intra_messages: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        """The traffic of two exchanges, one after the other."""
        return Traffic(*map(add, vars(self).values(), vars(other).values()))

    def __truediv__(self, steps: int) -> Traffic:
        """The part of each of so many steps, which have one such exchange together."""
        return Traffic(*(part / steps for part in vars(self).values()))

    def latency_seconds(self, hardware: Hardware) -> float:
        """Seconds of all messages' latencies, one after the other."""
        return (
            self.inter_messages * hardware.inter_latency_seconds
            + self.intra_messages * hardware.intra_latency_seconds
        )


def total(exchanges: Iterable[Traffic]) -> Traffic:
    """The traffic of many exchanges, one after the other."""
    sums = [0.0] * len(fields(Traffic))
    for each in exchanges:
        for at, part in enumerate(vars(each).values()):
            sums[at] += part
    return Traffic(*sums)


def flat(nbytes: float, nodes: int, ranks_per_node: int) -> Traffic:
    """An all-gather or reduce-scatter as one ring over all ranks, as NCCL and gloo build it."""
    world = nodes * ranks_per_node
    passed = (world - 1) / world * nbytes
    return Traffic(
        inter_node_bytes=passed if nodes > 1 else 0.0,
        intra_node_bytes=passed * (ranks_per_node - (nodes > 1)),
        intra_rank_bytes=passed if ranks_per_node > 1 else 0.0,
        # A part goes round all ranks; n of the edges that it passes lead to another node.
        inter_messages=min(nodes, world - 1) if nodes > 1 else 0,
        intra_messages=max(world - 1 - nodes, 0) if nodes > 1 else world - 1,
    )


def inter_node(nbytes: float, nodes: int) -> Traffic:
    """An inter-node all-gather or reduce-scatter, among ranks of equal local rank."""
    return Traffic(inter_node_bytes=(nodes - 1) / nodes * nbytes, inter_messages=nodes - 1)


def intra_node(nbytes: float, ranks_per_node: int) -> Traffic:
    """An intra-node all-gather or reduce-scatter."""
    passed = (ranks_per_node - 1) / ranks_per_node * nbytes
    return Traffic(
        intra_node_bytes=ranks_per_node * passed,
        intra_rank_bytes=passed,
        intra_messages=ranks_per_node - 1,
    )


def hierarchical(nbytes: float, nodes: int, ranks_per_node: int) -> Traffic:
    """An all-gather or reduce-scatter in both halves, one after the other."""
    return inter_node(nbytes, nodes) + intra_node(nbytes, ranks_per_node)


def all_reduce(half: Traffic) -> Traffic:
    """An all-reduce: a reduce-scatter, and an all-gather of the same bytes."""
    return half + half


def difference_bits(learning_rate: float, element_bytes: int) -> float:
    """Bits per parameter that a gather sends after a step of this learning rate.

    Interpolated between measurements by their logarithms; never more than the parameter itself.
    Raises ``ValueError`` for a learning rate that is not positive.
    """
    if not learning_rate > 0:
        raise ValueError(f"learning_rate = {learning_rate!r}: must be more than 0")
    points = [(math.log(rate), math.log(bits)) for rate, bits in MEASURED]
    at = math.log(learning_rate)
    # Beyond the ends the line through the last two points is extended.
    index = sum(at >= place for place, _ in points[1:-1])
    (x0, y0), (x1, y1) = points[index : index + 2]
    bits = math.exp(y0 + (at - x0) / (x1 - x0) * (y1 - y0))
    return min(bits, _BF16_BITS) + 8 * element_bytes - _BF16_BITS


@dataclass(frozen=True)
class Exchanges:
    """How one workload's units move under its strategy on one cluster."""

    workload: Workload
    hardware: Hardware

    @property
    def schedule(self) -> Schedule:
        return self.workload.schedule

    def gather(self, unit: Unit) -> list[Traffic]:
        """The exchanges of one gather, from the ranks that share the parameters, in their order."""
        nodes, ranks = self.hardware.shape
        if self.schedule.shards == "rank":
            return []
        if self.schedule.shards == "node" or nodes == 1:
            return [self.spread(unit)]
        codec = self._codecs["gather_codec"]
        coded = codec != "none"
        sent = self._sent_bytes(unit.gathered, codec) if coded else self.gathered_bytes(unit)
        if self.schedule.hierarchical:
            return [inter_node(sent, nodes), self.spread(unit)]
        return [flat(sent, nodes, ranks)]

    def spread(self, unit: Unit) -> Traffic:
        """The intra-node all-gather of slices that the ranks have already."""
        return intra_node(self.gathered_bytes(unit), self.hardware.ranks_per_node)

    def slice_bytes(self, unit: Unit) -> float:
        """Bytes of a rank's entry: our cache leaves out what the rank holds anyway."""
        nodes, ranks = self.hardware.shape
        whole = self.gathered_bytes(unit) / ranks
        return whole if self.schedule.caches_own_shard else (nodes - 1) / nodes * whole

    def reduce(self, trained: int, *, last: bool) -> list[Traffic]:
        """The exchanges that reduce the gradients of ``trained`` parameters of one micro-batch."""
        nodes, ranks = self.hardware.shape
        # A vendor's reduce-scatter over gloo is an all-reduce.
        by_gloo = self.hardware.backend == "gloo" and not self.schedule.pairwise
        nbytes = float(trained * self.workload.reduced_bytes)
        if self.schedule.shards == "rank":
            crosses = last and self.schedule.averages is None
            return [all_reduce(flat(nbytes, nodes, ranks))] if crosses else []
        inside = intra_node(nbytes, ranks)
        if by_gloo:
            inside = all_reduce(inside)
        if nodes == 1 or self.schedule.averages is not None:
            return [inside]
        if self.schedule.shards == "node":
            return [inside, all_reduce(inter_node(nbytes, nodes))] if last else [inside]
        codec = self._codecs["reduce_codec"]
        if self.schedule.hierarchical or codec != "none":  # the vendor's qgZ: two all-to-alls
            crossing = last or not self.schedule.accumulates_without_sync
            return [inside, self._across(trained, codec)] if crossing else [inside]
        ring = flat(nbytes, nodes, ranks)
        return [all_reduce(ring) if by_gloo else ring]

    def all_reduce(self, trained: int, *, last: bool) -> list[Traffic]:
        """The all-reduce of replicated parameters' gradients, by our engine."""
        if self.schedule.accumulates_without_sync and not last:
            return []
        nbytes = float(trained * self.workload.reduced_bytes)
        half = hierarchical if self.schedule.hierarchical else flat
        return [all_reduce(half(nbytes, *self.hardware.shape))]

    def average(self) -> Traffic:
        """A step's share of a round's all-reduce of displacements, which are fp32."""
        nbytes = float(FP32 * self.workload.trained)
        if self.schedule.shards == "rank":
            by_gloo = self.hardware.backend == "gloo" or self.workload.outer_on == "host"
            half = (hierarchical if by_gloo else flat)(nbytes, *self.hardware.shape)
        else:  # between ranks with the same part of a worker
            half = inter_node(nbytes, self.hardware.nodes)
        return all_reduce(half) / self.workload.interval

    def shard_bytes(self, unit: Unit) -> float:
        """Bytes of a rank's shard on the host or the disk; FSDP2 copies it in fp32, then casts."""
        element = FP32 if self.schedule.shards_fp32 else self.workload.element_bytes
        frozen = 0 if self.workload.lora is None else max(0, unit.parameters - unit.trained)
        less = frozen * max(0.0, element - self.workload.frozen_bytes)
        return (element * unit.parameters - less) / self.schedule.sharers(*self.hardware.shape)

    def gathered_bytes(self, unit: Unit) -> float:
        """Bytes of the whole unit as it is gathered."""
        trained = unit.trained * self.workload.element_bytes
        return trained + (unit.gathered - unit.trained) * self.workload.frozen_gathered_bytes

    @cached_property
    def _codecs(self) -> Mapping[str, str]:
        """The codecs that the strategy fixes, or the workload's, if the strategy has the choice."""
        usual = {"gather_codec": "none", "reduce_codec": "none"}
        strategy = registry.find(self.workload.strategy)
        chosen = {
            name: getattr(self.workload, name)
            for name in usual
            if name in strategy.settings.model_fields
        }
        return usual | chosen | strategy.fixes

    def _across(self, trained: int, codec: str) -> Traffic:
        """The inter-node half of a reduction."""
        if codec not in ("none", *EXPONENTS):
            return inter_node(self._sent_bytes(trained, codec), self.hardware.nodes)
        bits = 8.0 * self.workload.reduced_bytes
        waits = not math.isinf(self.hardware.inter_bytes_per_s)  # as the rule judges it
        if codec == EXPONENTS[1] or (codec == EXPONENTS[0] and waits):
            bits += _BY_EXPONENT - _BF16_BITS
        return inter_node(trained * bits / 8, self.hardware.nodes)

    def _sent_bytes(self, parameters: int, codec: str) -> float:
        """Bytes of the parameters while they travel; codecs encode shards, padding included."""
        if codec == "delta" and math.isinf(self.hardware.inter_bytes_per_s):
            codec = "none"  # nothing is waited for, so that its rule sends no differences
        if codec == "none":
            return float(parameters * self.workload.element_bytes)
        if codec in DIFFERENCES:
            rate = self.workload.learning_rate
            return parameters * difference_bits(rate, self.workload.element_bytes) / 8
        world = self.hardware.world_size
        return float(world * encoded_bytes(codec, shard_numel(parameters, world)))

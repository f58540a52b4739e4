"""The strategies in the terms of the cost model: where shards are, and what each gather reads.

Names are those of ``baselines.registry``. A vendor's implementation is the same algorithm with the
differences that are recorded here: flat rings, units of one matrix, blocking copies, reductions
that are not deferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from baselines import registry

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a strategy does with the parameters, gradients and optimizer states of a rank."""

    engine: registry.Engine
    #: Who shares one copy of the parameters: all ranks, those of a node, or nobody.
    shards: Literal["world", "node", "rank"] = "world"
    #: Whether exchanges among all ranks are one ring, or go inside the node and across apart.
    hierarchical: bool = False
    #: Where a gather finds what an earlier one has brought: a second shard inside the node, on its
    #: devices or in host memory, or what the cell's policy says; ``None``: it gathers anew.
    cache: Place | Literal["policy"] | None = None
    #: The policy of a strategy that fixes it.
    policy: str | None = None
    #: How long that lasts: the micro-batch, the step, or until the parameters change (frozen ones:
    #: forever).
    cached_for: Literal["micro-batch", "step", "change"] = "change"
    #: Whether only the last micro-batch reduces across nodes.
    defers: bool = False
    #: Whether frozen and trained parameters of a block have units of their own.
    apart: bool = False
    #: What is gathered at a time.
    unit: Literal["block", "matrix"] = "block"
    #: Where shards wait between gathers, and where the optimizer's states are and step.
    parameters: Place = "device"
    optimizer: Place = "device"
    #: Whether copies of parameters to the device stop computation.
    blocking: bool = False
    #: How far it gathers ahead, in blocks: over all that it has come through, and at most. What it
    #: has ahead at the end of forward it does not gather again in backward.
    lead_per_block: float = 0.0
    most_lead: float = 0.0
    #: What crosses nodes, where the strategy fixes it.
    gather_codec: str | None = None
    reduce_codec: str | None = None

    def keeps_in(self, policy: str) -> str | None:
        """The place or policy by which entries are kept, in a cell of ``policy``."""
        return (self.policy or policy) if self.cache == "policy" else self.cache


_OURS = Scheme(engine="fcdp", hierarchical=True, cache="policy", defers=True, apart=True)
_FSDP2 = Scheme(engine="fsdp2")
# One matrix is gathered ahead: its prefetch bucket of 5e7 elements is less than one at 30B. But
# modules that hold others gather one ahead too, so that the lead grows until two blocks are alive.
# By the bytes that it sent on the emulated cluster: 1.2 to 1.4 blocks on a model of two, on one of
# four between 1 and 1.8, most often over 5/3.
_DEEPSPEED = Scheme(engine="deepspeed", unit="matrix", lead_per_block=0.7, most_lead=1.7)
_DEEPSPEED_HPZ = replace(_DEEPSPEED, cache="device")
_DEEPSPEED_OFFLOAD = replace(_DEEPSPEED, optimizer="host")
_MICS = replace(_DEEPSPEED, shards="node", defers=True)

SCHEMES: Mapping[str, Scheme] = {
    "zero3": replace(_OURS, policy="none"),
    "hpz": replace(_OURS, policy="device"),
    "qwz": replace(_OURS, policy="none", gather_codec="int8"),
    "qgz": replace(_OURS, policy="none", reduce_codec="int4"),
    "zeropp": replace(_OURS, policy="device", gather_codec="int8", reduce_codec="int4"),
    "fcdp-sched": replace(_OURS, cached_for="step"),
    "fcdp": _OURS,
    "mics": Scheme(engine="fcdp", shards="node", hierarchical=True, defers=True),
    "offload": replace(_OURS, policy="none", parameters="host", optimizer="host"),
    # One all-reduce when backward has ended.
    "replicated": Scheme(engine="fcdp", shards="rank", hierarchical=True, defers=True),
    "fsdp2": _FSDP2,
    "fsdp2-hsdp": replace(_FSDP2, shards="node", defers=True),
    "fsdp2-reshard": replace(_FSDP2, cache="device", cached_for="micro-batch"),
    "fsdp2-offload": replace(_FSDP2, parameters="host", optimizer="host"),
    "ddp": Scheme(engine="ddp", shards="rank", defers=True),
    "deepspeed-zero3": _DEEPSPEED,
    "deepspeed-hpz": _DEEPSPEED_HPZ,
    "deepspeed-qwz": replace(_DEEPSPEED, gather_codec="int8"),
    # Its quantised reduction is two all-to-alls, inside the node and across.
    "deepspeed-qgz": replace(_DEEPSPEED, reduce_codec="int4"),
    "deepspeed-zeropp": replace(_DEEPSPEED_HPZ, gather_codec="int8", reduce_codec="int4"),
    "deepspeed-mics": _MICS,
    # Its two hops are inside the shard group, here one node: the same exchanges.
    "deepspeed-mics-hierarchical": _MICS,
    "deepspeed-offload": _DEEPSPEED_OFFLOAD,
    "deepspeed-offload-param": replace(_DEEPSPEED_OFFLOAD, parameters="host"),
    "deepspeed-infinity": replace(_DEEPSPEED, parameters="disk", optimizer="disk"),
    # A second shard in host memory: copied a parameter at a time, while nothing computes.
    "deepspeed-hpz-offload": replace(_DEEPSPEED, cache="host", parameters="host", blocking=True),
}
#: Sibling systems that have their place here, by the name of their folder in ``baselines``.
PLANNED = ("co2", "cyclic", "luwu", "fuyou")


def scheme(strategy: str) -> Scheme:
    """Raises ``ValueError`` for a strategy that does not exist or is not simulated yet."""
    if strategy in SCHEMES:
        return SCHEMES[strategy]
    if strategy in PLANNED or strategy in registry.STRATEGY_NAMES:
        raise ValueError(
            f"strategy = {strategy!r}: is not simulated yet; allowed are {', '.join(SCHEMES)}"
        )
    raise ValueError(f"strategy = {strategy!r}: allowed are {', '.join(SCHEMES)}")

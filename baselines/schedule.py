"""The schedule of a strategy: where its shards are, what each gather reads, what crosses when.

It is all that the closed forms, the simulator and the planner know of a strategy. A vendor's
implementation is the same algorithm with the differences that are recorded here: flat rings, units
of one matrix, blocking copies, reductions of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from baselines.settings import ExchangeKind
from fcdp.grouping import PartialsChoice

Place = Literal["device", "host", "disk"]
#: Who goes through a cycle's stages, whose parameters may be a step old: ranks that step together;
#: ranks two slots apart, which pass on a stage's gradients and new parameters, and keep all
#: parameters (``ring``) or their own stage's (``zero``); micro-batches of one rank, by turns.
Cycled = Literal["together", "ring", "zero", "turns"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of a strategy: where parameters, gradients and optimizer states are, and travel."""

    #: Who shares one copy of the parameters: all ranks, those of a node, or nobody.
    shards: Literal["world", "node", "rank"] = "world"
    #: Whether exchanges among all ranks are one ring, or go inside the node and across apart.
    hierarchical: bool = False
    #: Where a gather finds what an earlier one has brought: a second shard inside the node, on its
    #: devices or in host memory, or what the cell's policy says; ``None``: it gathers anew.
    cache: Place | Literal["policy"] | None = None
    #: The policy of a strategy that fixes it.
    policy: str | None = None
    #: Whether the model is cut into stages, each on nodes of its own, so that activations and their
    #: gradients cross. All else here is said of a stage and its own nodes.
    cut: bool = False
    #: How long what was gathered stays so: until it was used; or for the step, while gradients of
    #: micro-batches add up whole on each rank, in fp32.
    gathered_for: Literal["use", "step"] = "use"
    #: How long an entry lasts: the micro-batch, the step, or until the parameters change (frozen
    #: ones: forever).
    cached_for: Literal["micro-batch", "step", "change"] = "change"
    #: Gradient accumulation without sync: only the last micro-batch reduces across nodes.
    accumulates_without_sync: bool = False
    #: Where sums of micro-batches wait for the last one, if they are the library's.
    partial_gradients: PartialsChoice = "device"
    #: Workers that step apart, whose mean is formed once per round of steps: all wait for it; it
    #: arrives while the next round is computed; or fragments of it arrive in turn, each while some
    #: steps of the round are computed. Gradients are then reduced inside a worker alone.
    averages: Literal["waited", "late", "streamed"] | None = None
    #: Cyclic Data Parallelism's stages, and who goes through them two slots apart.
    cycle: Cycled | None = None
    #: Whether frozen and trained parameters of a block have units of their own.
    apart: bool = False
    #: Unit that is gathered at a time.
    unit: Literal["block", "matrix"] = "block"
    #: Where shards wait between gathers, and where the optimizer's states are and step.
    parameters: Place = "device"
    optimizer: Place = "device"
    #: Whether computation stops while parameters are copied to the device.
    blocking: bool = False
    #: How far it gathers ahead, in blocks: per block that it has computed, and at most. Blocks that
    #: it has ahead at the end of forward it does not gather again in backward.
    lead_per_block: float = 0.0
    most_lead: float = 0.0
    #: Codecs between nodes, where the strategy fixes them.
    gather_codec: str | None = None
    reduce_codec: str | None = None

    # How the implementation does it.

    #: Whether every parameter is padded to the same shard on all ranks.
    pads: bool = False
    #: Whether a low-rank factor of fewer rows than ranks is cut along another dimension.
    cuts_low_rank: bool = False
    #: Whether an entry of the cache has the rank's own shard in it, which it holds anyway.
    caches_own_shard: bool = True
    #: Whether slices of a unit lie on the device on their way across nodes and from the cache.
    stages: bool = False
    #: Whether ranks exchange in pairs, and, with a cache, ask each other what is stale. If not,
    #: gloo's rings carry it, whose reduce-scatter is an all-reduce.
    pairwise: bool = False
    #: Whether a gather inside the node runs ahead on a host of one thread.
    gathers_ahead_on_host: bool = True
    #: Whether ranks shard fp32 parameters, which a gather casts; else they shard what is gathered,
    #: beside an fp32 master that the optimizer steps in pieces.
    shards_fp32: bool = True
    #: Whether vectors and adapters are replicated, and gathered after each step.
    replicates_small: bool = False
    #: Whether what comes out of a gather or a reduction is copied out of its buffer.
    copies_out: bool = False
    #: Whether gradients keep their memory from one step to the next.
    keeps_gradients: bool = False
    #: How much of the bytes is an estimate, relative to them.
    estimated_share: float = 0.0

    def exchanging(
        self, exchanges: ExchangeKind, partial_gradients: PartialsChoice = "device"
    ) -> Schedule:
        """The schedule whose gathers and reductions cross nodes as a cell chooses."""
        if exchanges == "flat":
            return replace(self, hierarchical=False, accumulates_without_sync=False)
        if exchanges == "undeferred" or partial_gradients == "each":
            return replace(self, accumulates_without_sync=False)
        return replace(self, partial_gradients=partial_gradients)

    def sharers(self, nodes: int, ranks_per_node: int) -> int:
        """Ranks that share one copy of the parameters."""
        return {"world": nodes * ranks_per_node, "node": ranks_per_node, "rank": 1}[self.shards]

    @property
    def passes_on(self) -> bool:
        """Whether ranks send each other one stage at a time, and have no collective in a step."""
        return self.cycle in ("ring", "zero")

    def keeps_in(self, policy: str) -> str | None:
        """Where entries are kept in a cell of ``policy``: a place, or a policy's text."""
        return (self.policy or policy) if self.cache == "policy" else self.cache


#: This library's, with its own cache.
FCDP = Schedule(
    hierarchical=True,
    cache="policy",
    accumulates_without_sync=True,
    apart=True,
    pads=True,
    cuts_low_rank=True,
    caches_own_shard=False,
    stages=True,
    pairwise=True,
    copies_out=True,
)
FSDP2 = Schedule(pads=True, copies_out=True, gathers_ahead_on_host=False)
#: A pipeline's stage, by a cell's ``within_stage``; those that are replicated are not described.
STAGES: Mapping[str, Schedule] = {
    "sharded": replace(FSDP2, cut=True, gathered_for="step", accumulates_without_sync=True),
    "fcdp": replace(FCDP, cut=True),
}
DDP = Schedule(shards="rank", accumulates_without_sync=True, keeps_gradients=True)
#: Schedules of workers that are one rank; a cell may make each a node (``Workload.schedule``).
LOCAL_SGD = Schedule(shards="rank", averages="waited")
CO2 = replace(LOCAL_SGD, averages="late")
STREAMING = replace(LOCAL_SGD, averages="streamed")
#: The update rules alone, in DDP's loop.
CYCLIC = replace(DDP, cycle="together")
CYCLIC_RING = Schedule(shards="rank", cycle="ring")
CYCLIC_ZERO = Schedule(cycle="zero")
CYCLIC_INTERLEAVED = Schedule(
    shards="rank", cycle="turns", accumulates_without_sync=True, keeps_gradients=True
)
# One matrix is gathered ahead: its prefetch bucket of 5e7 elements is less than one at 30B. But
# modules that hold others gather one ahead too, so that the lead grows until two blocks are alive.
# By the bytes that it sent on the emulated cluster: 1.2 to 1.4 blocks on a model of two, on one of
# four between 1 and 1.8, most often over 5/3.
DEEPSPEED = Schedule(
    unit="matrix",
    lead_per_block=0.7,
    most_lead=1.7,
    shards_fp32=False,
    replicates_small=True,
    keeps_gradients=True,
    estimated_share=0.01,
)


def by_node(schedule: Schedule) -> Schedule:
    """The schedule of workers that step apart, each a node that FSDP2 shards."""
    return replace(within_node(FSDP2), averages=schedule.averages)


def within_node(schedule: Schedule) -> Schedule:
    """The schedule sharded inside the node and replicated across nodes: MiCS, hybrid sharding."""
    return replace(
        schedule,
        shards="node",
        cache=None,
        apart=False,
        accumulates_without_sync=True,
        cuts_low_rank=False,
    )

"""A question to the planner: what to train, on what, and which choices are open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

from baselines.registry import find, schedule_of, simulated
from baselines.settings import PipelineSchedule
from fcdp.grouping import PartialsChoice
from simulation import checks
from simulation.checks import Checked, NotNegative, Positive
from simulation.hardware import Hardware, card
from simulation.luwu import Server
from simulation.memory import check_policy
from simulation.models import shape, usual_length
from simulation.transformer import Targets
from simulation.workload import (
    PACKINGS,
    Attention,
    FrozenDtype,
    Kernels,
    ProductDtype,
    Recomputed,
    ReduceDtype,
    States,
    Workload,
    checkpointed,
)

#: Fewest tokens per sequence that are tried where nothing longer fits: ours.
_SHORTEST = 512
#: Shares of recomputed blocks with which a grid comes close to the best.
RECOMPUTED: tuple[Recomputed, ...] = (0.0, "selective", 0.5, 1.0)
#: Tokens of a step in full fine-tuning, and sequences of one with adapters, as people train.
_TOKENS, _SEQUENCES = 2**19, 128
#: Orders of a pipeline that are tried, and stages of each group of nodes.
_ORDERS: Sequence[tuple[PipelineSchedule, int]] = (("ahead", 1), ("interleaved", 2), ("zb", 1))
#: Engines that hold packed weights.
_PACKS = ("ddp", "fsdp2", "fcdp")


def holds_packed(strategy: str) -> bool:
    """Whether a strategy is known to replicate or gather packed weights, and none by a codec.

    FSDP2 does not reshard to fewer ranks what it gathers by an extension.
    """
    of = find(strategy)
    resharded = of.engine == "fsdp2" and of.schedule is not None and of.schedule.cache is not None
    return of.engine in _PACKS and "gather_codec" not in of.fixes and not resharded


def planned() -> tuple[str, ...]:
    """Names of the strategies of a plan that names none: all simulated ones, with few exceptions.

    Cyclic Data Parallelism sends no fewer bytes per step, needs more memory than micro-batches one
    at a time, and trains with old parameters: a matrix compares it. The FCDP paper's own system is
    ours with exchanges that send more, and FCDP that forgets what is frozen a part of ours. What is
    for CPUs alone is FSDP2 on a GPU.
    """
    schedules = {name: schedule_of(name) for name in simulated()}
    return tuple(
        name
        for name, of in schedules.items()
        if of.cycle is None
        and (of.hierarchical or not of.pairwise)
        and of.cached_for != "step"
        and find(name).cpu_only is None
    )


def _known(name: str, value: object) -> None:
    if value not in (None, "usual") and type(value) is not int:
        raise ValueError(f"{name} = {value!r}: allowed are a number, usual, and None")


#: Sequences per optimizer step of all ranks.
Batch = Annotated[int | Literal["usual"] | None, _known]


@dataclass(frozen=True, kw_only=True)
class Request(Checked):
    """A model, a cluster, and the axes of the grid to search.

    Raises ``ValueError`` naming the field for what cannot be.
    """

    #: A name in ``PAPER_MODELS`` or ``PUBLIC_MODELS``, the path of a Hugging Face ``config.json``
    #: or of its folder, or a name on the hub whose configuration is in the local cache.
    model: str
    hardware: Hardware
    #: ``None``: all parameters are trained.
    lora_rank: int | None = None
    #: Matrices that have adapters: attention's, or all linear layers of the blocks.
    lora_targets: Targets = "attention"
    #: None: the model's usual training length, or the longest half of it that fits.
    sequence_lengths: tuple[int, ...] = ()
    #: The usual length, where none was given: set here, and kept when a request is replaced.
    usual_length: int | None = None
    #: Sequences per rank and micro-batch; none: the largest that fits.
    micro_batches: tuple[int, ...] = ()
    recomputed: tuple[Recomputed, ...] = RECOMPUTED
    #: None: those of PyTorch, with ranges that include fused ones.
    kernels: Kernels | None = None
    #: Type in which frozen parameters are held, where adapters are trained.
    frozen_dtype: FrozenDtype = "bf16"
    reduce_dtype: ReduceDtype = "same"
    product_dtype: ProductDtype = "bf16"
    #: Generation of the fused attention; none: the second, with ranges that include the first.
    attention: Attention | None = None
    #: Dtypes of what the optimizer keeps.
    states: States = "fp32"
    strategies: tuple[str, ...] = planned()
    #: Cache policies of strategies that have the choice.
    policies: tuple[str, ...] = ("host",)
    #: Sequences per optimizer step, of all ranks; ``None``: one micro-batch each; ``usual``: about
    #: half a million tokens in full fine-tuning, 128 sequences with adapters.
    global_batch: Batch = None
    #: Tokens to be trained on, in all.
    tokens: Positive = 1e9
    price_per_gpu_hour: NotNegative | None = None
    #: A machine for LuWu's server, if there is one.
    server: Server | None = None

    def __post_init__(self) -> None:
        if not self.sequence_lengths:
            length = usual_length(self.model)
            object.__setattr__(self, "usual_length", length)
            object.__setattr__(self, "sequence_lengths", (length,))
        super().__post_init__()
        checks.counts(**{f"sequence_length[{i}]": n for i, n in enumerate(self.sequence_lengths)})
        checks.counts(**{f"micro_batch[{i}]": n for i, n in enumerate(self.micro_batches)})
        for strategy in self.strategies:
            if schedule_of(strategy).cycle is not None:
                raise ValueError(
                    f"strategy = {strategy!r}: is not planned: its ranks train with parameters a "
                    "step old, and send no less than DDP or ZeRO-3 do; allowed are "
                    f"{', '.join(planned())}"
                )
        for policy in self.policies:
            check_policy(policy)
        for name, usual in (("frozen_dtype", "bf16"), ("lora_targets", "attention")):
            if self.lora_rank is None and (value := getattr(self, name)) != usual:
                raise ValueError(
                    f"{name} = {value!r}: is of adapters; allowed without lora_rank (--peft) is "
                    f"{usual}"
                )
        if self.product_dtype == "fp8" and not card(self.hardware.device.name).fp8:
            raise ValueError(
                f"product_dtype = 'fp8': {self.hardware.device.name} has none; allowed with it is "
                "bf16"
            )
        if self.packed and self.frozen_dtype == "fp8" and self.product_dtype != "fp8":
            raise ValueError(
                f"frozen_dtype = 'fp8': is for products in fp8, not in {self.product_dtype}; "
                "allowed with these are fp32, bf16, nf4 and bnb-4bit, or product_dtype = 'fp8'"
            )
        ranks, given = self.hardware.world_size, self.global_batch
        if isinstance(given, int):
            if given < 1 or given % ranks:
                raise ValueError(f"global_batch = {given}: must be a multiple of the {ranks} ranks")
            for size in self.micro_batches:
                if given // ranks % size:
                    raise ValueError(
                        f"micro_batch = {size}: must divide the {given // ranks} sequences of a "
                        f"rank (global_batch = {given}, {ranks} ranks)"
                    )
        if self.hardware.nodes == 1 and self.strategies == ("pipeline",):
            raise ValueError("strategy = 'pipeline': needs 2 nodes or more")
        if not self.answered:
            raise ValueError(
                f"frozen_dtype = {self.frozen_dtype!r}: none of {', '.join(self.strategies)} is "
                "known to hold it; allowed with them are fp32 and bf16"
            )
        self.workloads()  # raises for what the model or a workload cannot be

    def shorter(self) -> Iterator[Request]:
        """The request at halves of the usual length, longest first; none if a length was given."""
        length = self.usual_length or 0
        while (length := length // 2) >= _SHORTEST:
            yield replace(self, sequence_lengths=(length,))

    @property
    def answered(self) -> tuple[str, ...]:
        """The strategies that can hold frozen parameters in this dtype, on so many nodes."""
        several = self.hardware.nodes > 1
        known = [name for name in self.strategies if several or not schedule_of(name).cut]
        return tuple(filter(holds_packed, known) if self.packed else known)

    @property
    def packed(self) -> bool:
        """Whether adapters' base is packed, or gathered so."""
        return self.lora_rank is not None and self.frozen_dtype in PACKINGS

    def sequences_per_rank(self, length: int) -> int | None:
        """Sequences of this length per rank and optimizer step; ``None``: a micro-batch.

        What is usual is rounded up, so that all ranks have as many, in whole micro-batches.
        """
        ranks = self.hardware.world_size
        if isinstance(self.global_batch, int):
            return self.global_batch // ranks
        if self.global_batch is None:
            return None
        sequences = -(-_TOKENS // length) if self.lora_rank is None else _SEQUENCES
        whole = math.lcm(*self.micro_batches)
        return -(-sequences // (ranks * whole)) * whole

    def _choices(self, strategy: str, length: int) -> Iterator[dict[str, Any]]:
        """Settings that are tried of what a strategy leaves open; the simplest come first."""
        of = find(strategy)
        if schedule_of(strategy).cut:
            yield from self._pipelines(length)
            return
        several = (self.sequences_per_rank(length) or 1) > 1
        sums: tuple[PartialsChoice, ...] = ("device", "host") if several else ("device",)
        if "partial_gradients" not in of.settings.model_fields:
            sums = sums[:1]
        for policy, partials in product(self.policies if of.has_policy else ("host",), sums):
            yield {"policy": policy, "partial_gradients": partials}

    def _pipelines(self, length: int) -> Iterator[dict[str, Any]]:
        """Pipelines: FSDP2 shards stages, on a node each, or FCDP, on groups of nodes.

        A pipeline has several micro-batches, those of all its groups, and so has sums.
        """
        sums: tuple[PartialsChoice, ...] = ("device", "host")
        nodes, layers = self.hardware.nodes, shape(self.model, length).layers
        sizes = [size for size in range(1, nodes) if nodes % size == 0]
        for within, size in (("sharded", 1), *(("fcdp", size) for size in sizes)):
            for (name, stages), partials in product(_ORDERS, sums if size > 1 else sums[:1]):
                if nodes // size * stages <= layers:
                    yield {
                        "within_stage": within,
                        "nodes_per_stage": size,
                        "pipeline_schedule": name,
                        "stages_per_node": stages,
                        "partial_gradients": partials,
                    }

    def workloads(self) -> list[Workload]:
        """The grid, but with a micro-batch of 1. The simplest points come first."""
        shapes = {length: shape(self.model, length) for length in self.sequence_lengths}
        rank = self.lora_rank
        return [
            Workload(
                strategy=strategy,
                model=shapes[length],
                lora=None if rank is None else shapes[length].lora(rank, self.lora_targets),
                sequence_length=length,
                micro_batch=1,
                **checkpointed(recomputed),
                kernels=self.kernels or "flash",
                frozen_dtype=self.frozen_dtype,
                reduce_dtype=self.reduce_dtype,
                attention=self.attention or "flash-2",
                product_dtype=self.product_dtype,
                states=self.states,
                element_bytes=2 if self.hardware.backend == "nccl" else 4,
                **chosen,
            )
            for strategy, length in product(self.answered, self.sequence_lengths)
            for chosen in self._choices(strategy, length)
            # Points that recompute least come first.
            for recomputed in sorted(self.recomputed, key=lambda r: 1e-9 if r == "selective" else r)
            # Zero bubble would recompute a block for each of its parameters apart.
            if recomputed == 0 or chosen.get("pipeline_schedule") != "zb"
        ]

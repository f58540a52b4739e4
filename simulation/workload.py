"""A workload for the simulator: a cell without the cluster that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baselines.registry import find, schedule_of
from baselines.schedule import Schedule, by_node
from baselines.settings import Exchanges, OuterPlace, UpdateRule
from simulation.checks import Checked, Count, Share
from simulation.transformer import Lora, Transformer

#: Kernels: attention by matrix products; fused attention, as PyTorch has it; and fused norms,
#: activation functions and loss besides, as a compiler or a library of such kernels makes them.
Kernels = Literal["eager", "flash", "fused"]
#: Whether backward computes a whole block again, or all but its matrix products and attention.
Checkpointing = Literal["full", "selective"]
#: What frozen parameters are held in: fp32 as FSDP2 has them unless told otherwise; bf16; blocks'
#: matrices in 4 bits with doubly quantised scales (QLoRA), the rest in bf16.
FrozenDtype = Literal["fp32", "bf16", "nf4"]
ReduceDtype = Literal["same", "fp32"]
Adapters = Literal["sharded", "replicated"]
_NF4_BYTES = 0.5 + 0.127 / 8


@dataclass(frozen=True, kw_only=True)
class Workload(Checked):
    """A strategy on a model, as the simulator sees it.

    Raises ``ValueError`` naming the field that cannot be.
    """

    strategy: str
    model: Transformer
    #: ``None``: all parameters are trained.
    lora: Lora | None = None
    sequence_length: Count
    #: Sequences per rank and micro-batch, and micro-batches between two optimizer steps.
    micro_batch: Count
    accumulation: Count = 1
    #: Bytes per element in gathers, computation and reductions. With 2, master weights stay fp32.
    element_bytes: Literal[2, 4] = 2
    #: Activation-checkpointing fraction: share of the blocks that backward recomputes.
    recomputed: Share = 0.0
    #: What these recompute.
    checkpointing: Checkpointing = "full"
    kernels: Kernels = "flash"
    frozen_dtype: FrozenDtype = "fp32"
    #: What gradients are summed in on their way: as they are, or in fp32.
    reduce_dtype: ReduceDtype = "same"
    #: Settings as a cell has them, for strategies that have the choice.
    policy: str = "host"
    gather_codec: str = "none"
    reduce_codec: str = "none"
    adapters: Adapters = "sharded"
    exchanges: Exchanges = "hierarchical"
    #: Of workers that step apart: steps per round, what a worker is, where the outer state lies.
    interval: Count = 12
    worker: str = "rank"
    outer_on: OuterPlace = "device"
    #: Of cycles: which parameters may be one step old, and how many stages there are, if not as
    #: many as micro-batches.
    rule: UpdateRule = "v2"
    stages: Count | None = None
    #: AdamW's, on which the size of differences depends (``gather_codec`` ``delta``).
    learning_rate: float = 1e-5
    #: LuWu's: bytes of a message, whether acknowledgements are merged, and whether frozen
    #: parameters are pulled once.
    chunk_bytes: Count = 256 * 1024
    merged: bool = True
    cached: bool = False

    @property
    def schedule(self) -> Schedule:
        """The strategy's, as the settings have it.

        Raises ``ValueError`` for a strategy that does not exist or is not simulated.
        """
        schedule = schedule_of(self.strategy).exchanging(self.exchanges)
        if schedule.averages is None or self.worker == "rank":
            return schedule
        if self.worker != "node":
            raise ValueError(
                f"worker = {self.worker!r}: workers of several nodes are not simulated; allowed "
                "are rank and node"
            )
        return by_node(schedule)

    @property
    def engine(self) -> str:
        """Whose hooks and calls a step has: as few as DDP's without FSDP2's or DeepSpeed's."""
        if self.served:  # nothing was fitted to LuWu
            return "fsdp2"
        schedule = self.schedule
        if schedule.shards == "rank" or schedule.cycle is not None:
            return "ddp"
        # Of workers that step apart, what trains one.
        return find(self.strategy).engine if schedule.averages is None else "fsdp2"

    @property
    def served(self) -> bool:
        """Whether a server beside the ranks has the model, as LuWu's."""
        return bool(find(self.strategy).extra)

    @property
    def frozen(self) -> int:
        """Parameters that nothing steps."""
        return self.parameters - self.trained

    @property
    def frozen_bytes(self) -> float:
        """Bytes per frozen parameter as it is held, the mean of all."""
        if self.frozen_dtype != "nf4":
            return 4.0 if self.frozen_dtype == "fp32" else 2.0
        quantised = self.model.layers * sum(matrix.weights for matrix in self.model.matrices)
        share = quantised / self.model.parameters
        return share * _NF4_BYTES + (1 - share) * 2.0

    @property
    def sent_frozen_bytes(self) -> float:
        """Bytes per frozen parameter in a gather: four bits are gathered as they are."""
        if self.lora is None or self.frozen_dtype != "nf4":
            return float(self.element_bytes)
        return self.frozen_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes per element of a reduction."""
        return self.element_bytes if self.reduce_dtype == "same" else 4

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def block_adapters(self) -> int:
        """Parameters of the adapters of one block."""
        return 0 if self.lora is None else self.model.adapter_parameters(self.lora)

    @property
    def parameters(self) -> int:
        """Parameters of the model, adapters included."""
        return self.model.parameters + self.model.layers * self.block_adapters

    @property
    def trained(self) -> int:
        """Parameters that the optimizer steps."""
        if self.lora is None:
            return self.model.parameters
        return self.model.layers * self.block_adapters

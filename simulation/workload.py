"""What is trained, and how: a cell without the cluster it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from simulation import checks
from simulation.transformer import Lora, Transformer

#: Bytes of an element: bfloat16 and float32.
_ELEMENT_BYTES = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A strategy on a model. Raises ``ValueError`` naming the field for an impossible one."""

    strategy: str
    model: Transformer
    #: ``None``: all parameters are trained.
    lora: Lora | None = None
    sequence_length: int
    #: Sequences a rank and micro-batch, and micro-batches between two optimizer steps.
    micro_batch: int
    accumulation: int = 1
    #: Of gathers, computation and reductions. With 2 bytes, master weights stay fp32.
    element_bytes: int = 2
    #: Share of the blocks whose activations are recomputed in backward.
    recomputed: float = 0.0
    #: As a cell has them, for strategies that have the choice.
    policy: str = "host"
    gather_codec: str = "none"
    reduce_codec: str = "none"
    adapters: str = "sharded"

    def __post_init__(self) -> None:
        checks.counts(
            sequence_length=self.sequence_length,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
        )
        checks.share(recomputed=self.recomputed)
        if self.element_bytes not in _ELEMENT_BYTES:
            raise ValueError(f"element_bytes = {self.element_bytes!r}: allowed are 2 and 4")
        if self.adapters not in ("sharded", "replicated"):
            raise ValueError(f"adapters = {self.adapters!r}: allowed are sharded and replicated")

    @property
    def tokens(self) -> int:
        """Of one rank and micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def block_adapters(self) -> int:
        """Parameters of the adapters of one block."""
        return 0 if self.lora is None else self.model.adapter_parameters(self.lora)

    @property
    def parameters(self) -> int:
        """All of them, adapters included."""
        return self.model.parameters + self.model.layers * self.block_adapters

    @property
    def trained(self) -> int:
        """Parameters that the optimizer steps."""
        if self.lora is None:
            return self.model.parameters
        return self.model.layers * self.block_adapters

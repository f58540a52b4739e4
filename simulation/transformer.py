"""The shape of a transformer: its matrices and its parameters, in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import prod
from typing import Literal

from pydantic import Field, model_validator

from fcdp import grouping
from simulation import checks
from simulation.checks import Checked, Count
from simulation.files import Name, Strict

Family = Literal["gpt2", "llama"]
#: Whether all parameters are trained, or adapters beside frozen ones.
Tuning = Literal["full", "lora"]
#: Matrices of a block that LoRA adapts where nothing else is said: Q, K, V and O, as in the paper.
ATTENTION: Mapping[Family, tuple[str, ...]] = {
    "gpt2": ("attn.c_attn", "attn.c_proj"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
}

#: The matrix that chooses a token's experts; it has no adapters.
ROUTER = "router"


@dataclass(frozen=True)
class Matrix:
    """A weight of a block; ``bias`` has ``outputs`` elements where there is one."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    #: Number of experts with such a matrix each, and of those that a token passes. None have it
    #: where blocks share it, so that it is stored outside of them.
    experts: int = 1
    active: int = 1
    #: Whether the experts' are one parameter.
    fused: bool = False

    @property
    def size(self) -> int:
        """Elements of one expert's, without the bias."""
        return self.inputs * self.outputs

    @property
    def weights(self) -> int:
        """Elements of all experts': what is stored, sharded and gathered."""
        return self.size * self.experts

    @property
    def active_weights(self) -> int:
        """Elements that a token is multiplied with."""
        return self.size * self.active


#: A parameter's dimensions; the first is what is sharded. Those of what is no matrix end with 1.
Shape = tuple[int, ...]


def padded_numel(parameters: Iterable[Shape], sharers: int, *, cut_rows: bool = False) -> int:
    """Elements of the parameters where each has its rows filled up to a multiple of the ranks.

    With ``cut_rows`` some are cut within rows, where that is even: see ``fcdp.grouping.cut``.
    """
    return sum(
        prod(shape)
        if cut_rows and grouping.cut(shape, sharers) is not None
        else -(-shape[0] // sharers) * sharers * prod(shape[1:])
        for shape in parameters
    )


#: Matrices that adapters are on.
Targets = Literal["attention", "all"]


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters of ``rank`` on the matrices ``targets`` of each block."""

    rank: int
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        checks.counts(lora_rank=self.rank)

    def on(self, model: Transformer) -> Lora:
        """Those of the adapters for which the model's blocks have matrices."""
        return Lora(self.rank, tuple(m.name for m in model.matrices if m.name in self.targets))


class ModelSpec(Strict):
    """A ``transformers`` configuration with random weights."""

    #: Name in cells and tables.
    name: Name
    family: Family
    layers: int = Field(ge=1)
    #: Width of the hidden state; a multiple of the heads.
    width: int = Field(ge=8)
    heads: int = Field(ge=1)
    #: Training data are bytes: a larger vocabulary costs memory and time, and learns nothing more.
    vocabulary: int = Field(default=256, ge=256)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ModelSpec:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


@dataclass(frozen=True, kw_only=True)
class Transformer(Checked):
    """A decoder of GPT-2's kind (LayerNorm, GELU) or Llama's (RMSNorm, a gated MLP).

    Raises ``ValueError`` naming the field for an impossible shape.
    """

    name: str
    family: Family
    layers: Count
    width: Count
    heads: Count
    vocabulary: Count
    #: Number of learned positions, of GPT-2.
    positions: int = 0
    mlp_width: int
    key_value_heads: Count
    #: Whether the output layer is the embedding.
    tied: bool
    #: Width of one head of attention; none: ``width / heads``.
    head_width: int | None = None
    #: Matrices that have a bias, of Llama's kind.
    biased: tuple[str, ...] = ()
    #: Whether Q, K and V are one matrix, and gate and up projection another (Phi-3).
    joined: bool = False
    #: Norms of a block, of Llama's kind, and what else of it is no matrix.
    norms: Count = 2
    vectors: tuple[Shape, ...] = ()
    #: Experts of an MLP, and those that a token passes.
    experts: Count = 1
    active_experts: Count = 1
    #: Whether each matrix of all experts is one parameter.
    fused: bool = False
    #: Most tokens that a token attends to; none: all before it.
    window: Count | None = None
    #: Most tokens per sequence; none: as many as there is room for.
    longest: int | None = None
    #: Matrices that were counted from modules in place of the above: a block's, those of attention,
    #: and what is outside of the blocks.
    counted_matrices: tuple[Matrix, ...] = ()
    counted_attention: tuple[str, ...] = ()
    counted_root: tuple[Shape, ...] = ()
    #: Elements of a token inside experts that all tokens pass, and inside recurrent mixers.
    beside: int = 0
    #: Channels of recurrent mixers times the elements of a channel's state.
    scanned: int = 0
    #: Where blocks differ: a shape for each kind, with its number of blocks; and each block's kind.
    kinds: tuple[Transformer, ...] = ()
    kind_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active_experts > self.experts:
            raise ValueError(
                f"active_experts = {self.active_experts}: must be at most experts = {self.experts}"
            )
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width = {self.width}: must be a multiple of heads = {self.heads}")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"key_value_heads = {self.key_value_heads}: must divide heads = {self.heads}"
            )

    def __hash__(self) -> int:
        """By the sizes that tell shapes apart: a search looks up workloads, each of which has one.

        Of all fields it would take longer than what is looked up.
        """
        return hash((self.name, self.layers, self.width, self.mlp_width, self.vocabulary))

    @classmethod
    def of(cls, spec: ModelSpec, sequence_length: int) -> Transformer:
        """The model that ``transformers`` makes of ``spec``, for sequences of so many tokens."""
        gpt2 = spec.family == "gpt2"
        llama_mlp_width = -(-spec.width * 8 // 3 // 8) * 8  # its own ratio, in multiples of 8
        return cls(
            name=spec.name,
            family=spec.family,
            layers=spec.layers,
            width=spec.width,
            heads=spec.heads,
            vocabulary=spec.vocabulary,
            positions=sequence_length if gpt2 else 0,
            mlp_width=4 * spec.width if gpt2 else llama_mlp_width,
            key_value_heads=spec.heads,
            tied=gpt2,
        )

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, of all heads; 0 in a block without attention."""
        own = self.head_width
        return self.heads * (self.width // self.heads if own is None else own)

    @property
    def narrow(self) -> int:
        """Elements of a token's keys, of all heads that have their own."""
        return self.attention_width * self.key_value_heads // self.heads

    def attended(self, length: int) -> float:
        """Tokens that a token attends to as trainers count: twice the mean of causal attention."""
        window = min(self.window or length, length)
        return window * (2 - window / length)

    @property
    def inner(self) -> int:
        """Elements of a token inside the MLP, of all experts that it passes; the most of blocks."""
        own = self.mlp_width * self.active_experts + self.beside
        return max((kind.inner for kind in self.kinds), default=own)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of one block."""
        if self.counted_matrices:
            return self.counted_matrices
        width, inner = self.width, self.mlp_width
        if self.family == "gpt2":
            return (
                Matrix("attn.c_attn", width, 3 * width, True),
                Matrix("attn.c_proj", width, width, True),
                Matrix("mlp.c_fc", width, inner, True),
                Matrix("mlp.c_proj", inner, width, True),
            )
        queries, narrow = self.attention_width, self.narrow
        shapes = [("q_proj", width, queries), ("k_proj", width, narrow), ("v_proj", width, narrow)]
        gated = [("gate_proj", width, inner), ("up_proj", width, inner)]
        if self.joined:
            shapes = [("qkv_proj", width, queries + 2 * narrow)]
            gated = [("gate_up_proj", width, 2 * inner)]
        shapes.append(("o_proj", queries, width))
        gated.append(("down_proj", inner, width))
        several = self.experts, self.active_experts, self.fused
        return (
            *(Matrix(*one, one[0] in self.biased) for one in shapes),
            *([Matrix(ROUTER, width, self.experts)] if self.experts > 1 else []),
            *(Matrix(*one, one[0] in self.biased, *several) for one in gated),
        )

    @property
    def block_rows(self) -> list[Shape]:
        """The parameters of one block without adapters: matrices, biases, norms, other vectors.

        GPT-2 keeps its matrices as (inputs, outputs), Llama as (outputs, inputs). Experts' are
        sharded one by one, or along the experts where they are one parameter.
        """
        gpt2 = self.family == "gpt2" and not self.counted_matrices
        matrices: list[Shape] = []
        for matrix in self.matrices:
            one = (matrix.inputs, matrix.outputs) if gpt2 else (matrix.outputs, matrix.inputs)
            matrices += [(matrix.experts, *one)] if matrix.fused else [one] * matrix.experts
        biases = [(m.outputs, 1) for m in self.matrices if m.bias for _ in range(m.experts)]
        norms = 0 if self.counted_matrices else 4 if gpt2 else self.norms
        return [*matrices, *biases, *[(self.width, 1)] * norms, *self.vectors]

    @property
    def root_rows(self) -> list[Shape]:
        """The parameters outside of the blocks: embeddings, last norm, output layer."""
        if self.counted_root:
            return list(self.counted_root)
        width, norms = self.width, 2 if self.family == "gpt2" else 1
        embeddings: list[Shape] = [(n, width) for n in (self.vocabulary, self.positions) if n]
        return embeddings + [(width, 1)] * norms + [(self.vocabulary, width)] * (not self.tied)

    def adapter_rows(self, lora: Lora) -> list[Shape]:
        """The adapters of one block. Raises ``ValueError`` for a target that it does not have."""
        names = [matrix.name for matrix in self.matrices]
        for target in lora.targets:
            if target not in names:
                raise ValueError(f"lora targets = {target!r}: allowed are {', '.join(names)}")
        adapted = [matrix for matrix in self.matrices if matrix.name in lora.targets]
        return [
            rows
            for matrix in adapted
            for rows in ((lora.rank, matrix.inputs), (matrix.outputs, lora.rank))
        ]

    @property
    def order(self) -> tuple[int, ...]:
        """Index of each block's kind; 0 where all are equal."""
        return self.kind_of or (0,) * self.layers

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one block without adapters, of the largest where they differ."""
        own = padded_numel(self.block_rows, 1)
        return max((kind.block_parameters for kind in self.kinds), default=own)

    @cached_property
    def root_parameters(self) -> int:
        """Parameters outside of the blocks."""
        return padded_numel(self.root_rows, 1)

    @property
    def embedded_parameters(self) -> int:
        """Parameters that come before the blocks: embeddings, and not the last norm."""
        return padded_numel(takewhile(lambda rows: rows[1] > 1, self.root_rows), 1)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model without adapters."""
        blocks = sum(kind.layers * kind.block_parameters for kind in self.kinds or (self,))
        return blocks + self.root_parameters

    def adapter_parameters(self, lora: Lora) -> int:
        """Parameters of the adapters of one block; raises as ``adapter_rows``."""
        return padded_numel(self.adapter_rows(lora), 1)

    def lora(self, rank: int, on: Targets = "attention") -> Lora:
        """The paper's adapters: on Q, K, V and O; or on all matrices but routers and experts."""
        if on == "all":
            linear = [m.name for m in self.matrices if m.experts == 1 and m.name != ROUTER]
            return Lora(rank, tuple(linear))
        joined = ("qkv_proj", "o_proj") if self.joined else ATTENTION[self.family]
        return Lora(rank, self.counted_attention or joined)

    @property
    def head_flops(self) -> float:
        """Operations of one token's forward in the output layer."""
        return 2.0 * self.vocabulary * self.width

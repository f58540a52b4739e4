"""Work in three parts (matrix products, attention, bytes through memory) and a GPU's rates of each.

One share of the peak for all computation cannot be right for every width and length: products grow
with the square of the width, attention with the length, and all else with the width. The rates are
fitted to published measurements in ``simulation.compute``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import Literal

from simulation import checks

#: What rates rest on: measurements of this GPU, of one of a similar architecture, data sheets
#: alone, or matrix products, or a transformer block, that preflight measured on the very nodes.
Basis = Literal["fitted", "nearest architecture", "data sheet", "preflight", "preflight's block"]

#: Nodes at which what is lost with scale turns from linear to logarithmic.
_MANY_NODES = 32


@dataclass(frozen=True)
class Work:
    """Computation, of a token or of many."""

    #: Operations as trainers count them: every token attends to all of the sequence.
    flops: float
    #: Operations of matrix products, and of attention as a causal kernel does it.
    products: float = 0.0
    attention: float = 0.0
    #: Bytes that kernels read from the device's memory and write to it.
    nbytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.products + other.products,
            self.attention + other.attention,
            self.nbytes + other.nbytes,
        )

    def __mul__(self, times: float) -> Work:
        return Work(
            times * self.flops,
            times * self.products,
            times * self.attention,
            times * self.nbytes,
        )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a GPU computes, and how sure that is.

    Raises ``ValueError`` naming the field that cannot be.
    """

    #: Operations and bytes per second.
    products_per_s: float
    attention_per_s: float
    bytes_per_s: float
    #: Rate at which bytes that are gathered or reduced take time from computation: by casts, copies
    #: into and out of buffers, and collectives' kernels.
    exchanged_bytes_per_s: float = float("inf")
    #: Share of the throughput that ``_MANY_NODES`` nodes more lose to one another's delays.
    lost_with_scale: float = 0.0
    #: Factors of tokens per second between which nine of ten measurements lay.
    lowest: float = 1.0
    highest: float = 1.0
    basis: Basis = "data sheet"
    #: The GPU that was measured, where it is another one.
    measured_on: str | None = None

    def __post_init__(self) -> None:
        checks.positive(
            products_per_s=self.products_per_s,
            attention_per_s=self.attention_per_s,
            bytes_per_s=self.bytes_per_s,
            exchanged_bytes_per_s=self.exchanged_bytes_per_s,
            lowest=self.lowest,
            highest=self.highest,
        )
        checks.share(lost_with_scale=self.lost_with_scale)

    def seconds(self, work: Work) -> float:
        """Seconds of the work on one GPU of a single node."""
        return (
            work.products / self.products_per_s
            + work.attention / self.attention_per_s
            + work.nbytes / self.bytes_per_s
        )

    def slower(self, nodes: int) -> float:
        """Factor of the time of computation on so many nodes."""
        return 1 / (1 - min(0.9, self.lost_with_scale * scale(nodes)))

    def with_products(self, products_per_s: float) -> Rates:
        """The rates where matrix products were measured; attention is as much faster or slower."""
        times = products_per_s / self.products_per_s
        return replace(
            self,
            products_per_s=products_per_s,
            attention_per_s=times * self.attention_per_s,
            basis="preflight",
        )

    def with_block(self, work: Work, seconds: float) -> Rates:
        """The rates where a block was measured: all parts are as much faster or slower."""
        times = self.seconds(work) / seconds
        return replace(
            self,
            products_per_s=times * self.products_per_s,
            attention_per_s=times * self.attention_per_s,
            bytes_per_s=times * self.bytes_per_s,
            basis="preflight's block",
        )


def scale(nodes: int) -> float:
    """How far ``nodes`` are from one: linear up to ``_MANY_NODES``, then logarithmic."""
    return log2(1 + (nodes - 1) / _MANY_NODES)

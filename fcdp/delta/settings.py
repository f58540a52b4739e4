"""Lossless codecs as users choose them: differences in gathers, exponents in reductions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fcdp.agreement import on_all_ranks
from fcdp.delta import message
from fcdp.delta.difference import prepare
from fcdp.delta.economy import When
from fcdp.delta.exact_reduce import ExactReductions
from fcdp.delta.gathers import Differences
from fcdp.hooks import EngineParts, LosslessCodec, LosslessGather, LosslessReduce
from fcdp.rounding import check_dtypes
from fcdp.topology import Topology
from fcdp.unit import Unit


def _load(codec: LosslessCodec, topology: Topology) -> None:
    if topology.mesh.device_type == "cpu":
        on_all_ranks(f"codec = {codec}", topology, prepare)


@dataclass(frozen=True)
class Delta(LosslessGather):
    """Lossless differences: of a gather, what has changed since the other nodes were given a shard.

    An optimizer step moves most weights by a few units in the last place, or not at all. The owner
    of a shard subtracts what it last sent from what it has now, as integers, and the other nodes
    add that to what their caches hold; the sum is the shard, bit for bit. With bf16 parameters and
    a learning rate of 1e-5 that takes about 1.3 bits per parameter instead of 16, 0.7 by entropy
    codes. What is not held (the first step, a policy that keeps less) is sent whole.

    For ``CommOptions.gather_codec``; on the CPU it needs ``pip install "fcdp[differences]"``. Each
    rank keeps its own shards as it last sent them, 1/(L·n) of the model, where its parameters are.
    On an accelerator differences are sent wherever they are smaller.

    Args:
        when: ``"pays"``: a rank sends a difference where coding it takes less time than is waited
            for the bytes that it saves, and its whole shard otherwise; with entropy codes, of half
            the bytes, where these save more than they take. ``"always"``: a difference whatever it
            takes. ``"smallest"``: always one with entropy codes.

    Raises:
        ValueError: another ``when``.

    Example:
        >>> exact = fcdp.shard(Net(), topology, comm=fcdp.CommOptions(gather_codec=fcdp.Delta()))
        >>> fcdp.is_cached(exact)
        True
    """

    when: When = "pays"

    def __post_init__(self) -> None:
        if self.when not in get_args(When):
            raise ValueError(f"when = {self.when!r}: must be 'pays', 'always' or 'smallest'")

    def load(self, topology: Topology) -> None:
        _load(self, topology)

    def check(self, units: Sequence[Unit]) -> None:
        what = "floating dtype of 2, 4 or 8 bytes"
        check_dtypes(units, self, lambda dtype: dtype in message.DTYPES, what=what)

    def extend(self, parts: EngineParts) -> Differences:
        return Differences(self.when, parts)


@dataclass(frozen=True)
class Exact(LosslessReduce):
    """Lossless reductions: the exponents of gradients coded, signs and mantissas as they are.

    Numbers near each other in a gradient are of one magnitude. With bf16 they take about 11 bits
    instead of 16, with fp32 27 instead of 32; sums are those of today, bit for bit.

    For ``CommOptions.reduce_codec``, on the CPU; it needs ``pip install "fcdp[differences]"``.

    Args:
        when: ``"pays"``: where coding takes less time than is waited for the bytes that it saves.
            ``"always"``: whatever it takes.

    Raises:
        ValueError: another ``when``.

    Example:
        >>> comm = fcdp.CommOptions(reduce_codec=fcdp.Exact())
        >>> exact = fcdp.shard(Net(), topology, comm=comm)
        >>> fcdp.is_cached(exact)
        True
    """

    when: Literal["pays", "always"] = "pays"

    def __post_init__(self) -> None:
        if self.when not in ("pays", "always"):
            raise ValueError(f"when = {self.when!r}: must be 'pays' or 'always'")

    def load(self, topology: Topology) -> None:
        _load(self, topology)

    def check(self, topology: Topology) -> None:
        if topology.mesh.device_type != "cpu":
            raise ValueError(
                f"reduce_codec = fcdp.Exact() on {topology.mesh.device_type}: only the CPU is "
                "allowed, as the host would wait for the sizes of each reduction; leave it out, "
                "or use fcdp.BlockInt8(), which rounds"
            )

    def extend(self, parts: EngineParts) -> ExactReductions:
        return ExactReductions(self.when, parts)

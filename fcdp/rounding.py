"""Codecs that round where values cross nodes: what gathers and reductions send in their place."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fcdp.codec import Codec
from fcdp.counts import Ledger, Phase
from fcdp.exchange import Pending, Then, all_to_all
from fcdp.streams import Slice
from fcdp.topology import Topology
from fcdp.unit import Unit


class RoundedGather:
    """Rounds one unit's shards: a :class:`fcdp.hooks.GatherHook`.

    The output of a gather has every shard, this rank's own included, as it decodes: all nodes
    compute with equal weights. The cache keeps decoded shards.
    """

    def __init__(self, codec: Codec, topology: Topology) -> None:
        self._codec = codec
        self._nodes, self._node = topology.nodes, topology.node

    def hit(self, own: torch.Tensor) -> None:
        self._rounded(own)

    def prepare(self, received: Slice, phase: Phase, *, difference: bool) -> None:
        """There is nothing to get ready."""

    def encode(self, own: torch.Tensor, received: Slice) -> tuple[torch.Tensor, torch.Tensor]:
        outgoing = self._rounded(own)
        # Each message has to begin at a multiple of four bytes.
        length = outgoing.numel() + -outgoing.numel() % 4
        return outgoing, outgoing.new_empty((self._nodes, length))

    def sent(self, works: Sequence[Pending]) -> Sequence[Pending]:
        return works

    def decode(self, messages: torch.Tensor, received: Slice) -> None:
        for node, row in enumerate(received.memory.unbind()):
            if node != self._node:
                encoded = messages[node][: self._codec.encoded_bytes(row.numel())]
                self._codec.decode(encoded, row)

    def stored(self, own: torch.Tensor) -> None:
        """Nothing of what was sent is kept."""

    def _rounded(self, shard: torch.Tensor) -> torch.Tensor:
        """Encode a shard, and round it in place to what the other nodes decode."""
        encoded = self._codec.encode(shard)
        self._codec.decode(encoded, shard)
        return encoded


@dataclass(eq=False)
class RoundedReduce:
    """Reduce-scatters one unit's partial sums over ``group``; each part is rounded once.

    With ``error_feedback`` the rounding of each part sent is added to what is sent next:
    (g−1) · s elements in fp32 for a group of g, from the first reduction on.
    """

    codec: Codec
    group: dist.ProcessGroup
    ledger: Ledger
    _: KW_ONLY
    error_feedback: bool
    #: A sum of several micro-batches is rounded from the dtype that it was added up in.
    wide: ClassVar[bool] = True

    def __post_init__(self) -> None:
        #: Losses of parts by rounding so far, by the group's rank that they go to.
        self._residuals: dict[int, torch.Tensor] = {}

    def start(self, output: torch.Tensor, partial: torch.Tensor) -> list[Pending]:
        """Sum ``partial`` (g·s) over the group's g ranks; this rank's part (s) goes to ``output``.

        This rank's own part is not rounded. Parts are added in rank order, in fp32 or wider, when
        what is returned is waited for; ``partial`` must last until then.
        """
        size, rank = self.group.size(), self.group.rank()
        wide = torch.promote_types(partial.dtype, torch.float32)
        parts = partial.view(size, -1).unbind()
        sent = [
            parts[rank] if peer == rank else self._encode(peer, part.to(wide))
            for peer, part in enumerate(parts)
        ]
        received = [
            part if peer == rank else torch.empty_like(part) for peer, part in enumerate(sent)
        ]
        works = all_to_all(received, sent, self.group)
        count = (size - 1) * self.codec.encoded_bytes(output.numel())
        self.ledger.add("inter_node", "reduce", count)

        def decode() -> None:
            total = torch.zeros_like(output, dtype=wide)
            summand = torch.empty_like(total)
            for peer in range(size):
                if peer == rank:
                    total += parts[peer]
                else:
                    self.codec.decode(received[peer], summand)
                    total += summand
            output.copy_(total)

        return [*works, Then(decode)]

    def forget(self) -> None:
        """Drop the residuals: they belong to parameters that have been replaced."""
        self.ledger.residual_bytes -= sum(lost.nbytes for lost in self._residuals.values())
        self._residuals.clear()

    def _encode(self, peer: int, values: torch.Tensor) -> torch.Tensor:
        if not self.error_feedback:
            return self.codec.encode(values)
        residual = self._residuals.get(peer)
        # Other parameters received gradients than last time: the residual belongs elsewhere.
        if residual is not None and residual.numel() == values.numel():
            values = values + residual
        encoded = self.codec.encode(values)
        decoded = torch.empty_like(values)
        self.codec.decode(encoded, decoded)
        # Values that overflowed are skipped by the gradient scaler; they must not stay here.
        lost = (values - decoded).float().nan_to_num_(0.0, 0.0, 0.0)
        self.ledger.residual_bytes += lost.nbytes - (0 if residual is None else residual.nbytes)
        self._residuals[peer] = lost
        return encoded


def check_dtypes(
    units: Sequence[Unit], codec: Any, takes: Callable[[torch.dtype], bool], *, what: str
) -> None:
    """Raise ``ValueError`` for a unit whose gather is not of one dtype that the codec takes.

    ``what`` names these dtypes.
    """
    for unit in units:
        if unit.packed:
            raise ValueError(
                f"gather_codec = {codec}: {unit.name} gathers packed parameters, by FSDP2 "
                "extensions, whose bytes no codec may change; leave gather_codec out"
            )
        dtype, *others = unit.gather_dtypes
        if others or not takes(dtype):
            dtypes = ", ".join(sorted(map(str, unit.gather_dtypes)))
            raise ValueError(
                f"gather_codec = {codec}: {unit.name} gathers parameters of {dtypes}; each unit "
                f"must gather one {what}, for example with MixedPrecisionPolicy(param_dtype=...)"
            )

"""Encoded reduce-scatters across nodes, the second half of a reduction, in fewer bytes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fcdp.codec import Codec, Delta
from fcdp.counts import Ledger
from fcdp.delta import message
from fcdp.delta.economy import Economy, Watch
from fcdp.delta.sent import apply
from fcdp.exchange import Pending, Then, add_up, all_to_all
from fcdp.topology import Topology
from fcdp.unit import Unit


@dataclass(eq=False)
class EncodedReduce:
    """Reduce-scatters one unit's partial sums over ``group``; each part is rounded once.

    With ``error_feedback`` the rounding of each part sent is added to what is sent next:
    (g−1) · s elements in fp32 for a group of g, from the first reduction on.
    """

    codec: Codec
    group: dist.ProcessGroup
    ledger: Ledger
    error_feedback: bool

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


@dataclass(eq=False)
class ExactReduce:
    """Reduce-scatters one unit's partial sums over ``group``, bit for bit as without a codec.

    Parts are sent coded by their exponents, or whole where that takes less time.
    """

    name: str
    group: dist.ProcessGroup
    economy: Economy
    ledger: Ledger
    #: Bytes of the last coded message per byte of its part.
    _ratio: float = 0.0

    def start(self, output: torch.Tensor, partial: torch.Tensor) -> list[Pending]:
        """Do as :meth:`EncodedReduce.start`, but add up in the order and dtype of plain sums."""
        size, rank = self.group.size(), self.group.rank()
        parts = partial.view(size, -1).unbind()
        summands, sent, received = [*parts], [*parts], [*parts]
        for peer, part in enumerate(parts):
            if peer != rank:
                summands[peer], sent[peer] = torch.empty_like(part), self.write(part)
                room = torch.empty(message.most_bytes(part), dtype=torch.uint8, device="cpu")
                received[peer] = room
        works = all_to_all(received, sent, self.group)

        def read() -> None:
            arriving = [*zip(received, summands, strict=True)]
            del arriving[rank]
            self.read(works, arriving)
            add_up(output, summands)

        return [Then(read)]

    def write(self, part: torch.Tensor) -> torch.Tensor:
        """Return the message (uint8) of a part (s), whose bytes the ledger counts."""
        begun = time.perf_counter()
        if self.economy.pays(self._ratio, others=1):
            encoded = message.write(part, None, message.ALONE)
            size = max(1, part.nbytes)
            self._ratio = encoded.nbytes / size
            self.economy.encoding.add((time.perf_counter() - begun) / size)
        else:
            encoded = message.whole(part)
        self.ledger.add("inter_node", "reduce", encoded.nbytes)
        return encoded

    def read(
        self, works: Sequence[Pending], arriving: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Wait for messages, and decode each into its part (s).

        Raises ``RuntimeError`` for a message that was damaged.
        """
        watch = Watch(works)
        watch.wait()
        nbytes = sum(part.nbytes for _, part in arriving)
        if all(message.is_whole(arrived) for arrived, _ in arriving):
            self.economy.saw_whole(watch.waited, nbytes)
        else:
            self.economy.saw_coded(watch.took, nbytes)
        for arrived, part in arriving:
            whose = f"{self.name}: gradients of another node"
            apply(arrived, part, message.ALONE, self.economy, whose)


def check_exact(topology: Topology) -> None:
    """Raises ``ValueError`` where the host cannot know the sizes of what is exchanged."""
    if topology.mesh.device_type != "cpu":
        raise ValueError(
            f"reduce_codec = fcdp.Exact() on {topology.mesh.device_type}: only the CPU is allowed, "
            "as the host would wait for the sizes of each reduction; leave it out, or use "
            "fcdp.BlockInt8(), which rounds"
        )


def check_encodable(units: Sequence[Unit], codec: Codec | Delta) -> None:
    """Raises ``ValueError`` for a unit whose gather is not of one dtype that the codec takes."""
    is_delta = isinstance(codec, Delta)
    for unit in units:
        taken = (
            dtype in message.DTYPES if is_delta else dtype.is_floating_point
            for dtype in unit.gather_dtypes
        )
        if len(unit.gather_dtypes) > 1 or not all(taken):
            dtypes = ", ".join(sorted(map(str, unit.gather_dtypes)))
            raise ValueError(
                f"gather_codec = {codec}: {unit.name} gathers parameters of {dtypes}; each unit "
                f"must gather one floating dtype{' of 2, 4 or 8 bytes' * is_delta}, for example "
                "with MixedPrecisionPolicy(param_dtype=...)"
            )

"""Reductions across nodes whose messages are coded by their exponents, which rounds nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from fcdp.counts import Ledger
from fcdp.delta import message
from fcdp.delta.economy import Economy, Watch, When
from fcdp.delta.sent import apply
from fcdp.exchange import Pending, Then, add_up, all_to_all
from fcdp.hooks import EngineParts
from fcdp.unit import Unit


class ExactReductions:
    """Coded reductions of one engine: a :class:`fcdp.hooks.ReduceExtension`.

    Ranks vote whether their link has become faster, so that it is learned anew.
    """

    def __init__(self, when: When, parts: EngineParts) -> None:
        self._economy = Economy(when)
        self._parts = parts

    def votes(self) -> list[bool]:
        return [self._economy.faster]

    def agreed(self, votes: Sequence[bool]) -> None:
        if votes[0]:
            self._economy.measure_again()

    def hook(self, unit: Unit) -> ExactReduce:
        group, ledger = unit.topology.reduce_inter, self._parts.ledger
        return ExactReduce(unit.name, group, economy=self._economy, ledger=ledger)


@dataclass(eq=False)
class ExactReduce:
    """Reduce-scatters one unit's partial sums over ``group``, bit for bit as without a codec.

    Parts are sent coded by their exponents, or whole where that takes less time.
    """

    name: str
    group: dist.ProcessGroup
    _: KW_ONLY
    economy: Economy
    ledger: Ledger
    #: Sums are cast as without a codec, and coded then.
    wide: ClassVar[bool] = False
    #: Bytes of the last coded message per byte of its part.
    _ratio: float = 0.0

    def start(self, output: torch.Tensor, partial: torch.Tensor) -> list[Pending]:
        """Sum ``partial`` (g·s) over the group's g ranks; this rank's part (s) goes to ``output``.

        Parts are added in the order and dtype of plain sums, when what is returned is waited for;
        ``partial`` must last until then.
        """
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
        if part.nbytes and self.economy.pays(self._ratio, others=1):
            encoded = message.write(part, None, message.ALONE)
            self._ratio = encoded.nbytes / part.nbytes
            self.economy.encoding.add((time.perf_counter() - begun) / part.nbytes)
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
            apply(arrived, part, message.ALONE, economy=self.economy, name=whose)

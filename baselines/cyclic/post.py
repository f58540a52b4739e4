"""Messages between ranks: sends that do not wait, and receives that begin one message ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from baselines.cyclic.routes import KINDS, Kind, Message

Key = tuple[Kind, int]


class Post:
    """What one rank sends and receives, by gloo, in float32."""

    def __init__(
        self,
        sends: Mapping[Key, Message],
        receives: Mapping[Key, Message],
        sizes: Mapping[Kind, Sequence[int]],
        rank: int,
        period: int,
    ) -> None:
        """``receives``: in the order of a step; ``sizes``: elements of each stage's messages.

        ``period``: slots from the start of a step to that of the next.
        """
        self._sends = sends
        self._receives = receives
        self._sizes = sizes
        self._rank = rank
        self._period = period
        #: Steps that are done; below 0 before the first.
        self.step = 0
        order = [*receives]
        self._next = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self.group = dist.new_group(backend="gloo")
        #: What is being received, or has been and is not taken yet.
        self._coming: dict[Key, tuple[torch.Tensor, Any]] = {}
        #: What is being sent, whose memory must stay until it is, and the slot that needs it.
        self._going: list[tuple[int, torch.Tensor, Any, Message]] = []

    def sends(self, kind: Kind, stage: int) -> bool:
        """Whether this rank sends such a message."""
        return (kind, stage) in self._sends

    def receives(self, kind: Kind, stage: int) -> bool:
        """Whether this rank receives such a message."""
        return (kind, stage) in self._receives

    def send(self, kind: Kind, stage: int, tensor: torch.Tensor) -> int:
        """Begin to send ``tensor``, which nobody writes any more; return its bytes.

        None of them is sent where the rank itself is the target.
        """
        message = self._sends[kind, stage]
        held = tensor.to("cpu")
        if message.target == self._rank:
            self._coming[kind, stage] = (held, None)
            return 0
        start = self.step * self._period
        if self.step >= 0:  # before the first step nobody receives yet
            self._end_those_needed_before(start + message.sent)
        if held.numel():
            work = dist.isend(held, group=self.group, group_dst=message.target, tag=_tag(message))
            self._going.append((start + message.needed, held, work, message))
        return held.nbytes

    def take(self, kind: Kind, stage: int) -> torch.Tensor:
        """Wait for a message; begin to receive the one that is needed after it.

        Raises ``RuntimeError`` where it does not come.
        """
        self.expect(kind, stage)
        self.expect(*self._next[kind, stage])
        self.land(kind, stage)
        return self._coming.pop((kind, stage))[0]

    def expect(self, kind: Kind, stage: int) -> None:
        """Begin to receive a message, if that has not begun."""
        message = self._receives[kind, stage]
        if (kind, stage) in self._coming or message.source == self._rank:
            return
        buffer = torch.empty(self._sizes[kind][stage])
        work = None
        if buffer.numel():
            work = dist.irecv(buffer, group=self.group, group_src=message.source, tag=_tag(message))
        self._coming[kind, stage] = (buffer, work)

    def land(self, kind: Kind, stage: int) -> torch.Tensor:
        """Wait for a message, and leave it to be taken."""
        self.expect(kind, stage)
        buffer, work = self._coming[kind, stage]
        if work is not None:
            _wait(work, "did not come from", self._receives[kind, stage].source, kind, stage)
            self._coming[kind, stage] = (buffer, None)
        return buffer

    def settle(self) -> None:
        """Wait until all that was sent has been received."""
        for _, _, work, message in self._going:
            _wait(work, "did not reach", message.target, message.kind, message.stage)
        self._going.clear()

    def _end_those_needed_before(self, slot: int) -> None:
        """Let go of what has been received by the schedule's clock: gloo tells it by waiting alone.

        A wait for what an earlier slot needs; the order of slots stays without circles.
        """
        for needed, _, work, message in self._going:
            if needed < slot:
                _wait(work, "did not reach", message.target, message.kind, message.stage)
        self._going = [entry for entry in self._going if entry[0] >= slot]


_WORDS: dict[Kind, str] = {
    "forward": "parameters for forward",
    "backward": "parameters for backward",
    "gradient": "gradients",
    "sum": "sum of gradients",
}


def _wait(work: Any, what: str, rank: int, kind: Kind, stage: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"stage {stage}'s {_WORDS[kind]} {what} rank {rank}: it has ended, or hangs"
        ) from error


def _tag(message: Message) -> int:
    return message.stage * len(KINDS) + KINDS.index(message.kind)

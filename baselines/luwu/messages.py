"""Messages between roles: a fixed header and a payload, each one frame of ZeroMQ's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

_HEADER = struct.Struct("<4sBIIII")
_MAGIC = b"LuW1"
#: Bytes of the largest chunk that may be chosen, and of the largest frame that is let in.
LARGEST_CHUNK = 4 * 2**20
LARGEST_FRAME = LARGEST_CHUNK + 64 * 1024
#: In place of a worker's rank: all of them.
ALL = 2**32 - 1


class Kind(IntEnum):
    """What a message is."""

    #: A worker's plan, as JSON; all workers' are alike. Answered by WELCOME: the last complete
    #: step, and whether initial parameters are wanted (``extra``).
    HELLO = 1
    WELCOME = 2
    #: A chunk of the initial parameters, in float32, of worker 0.
    INITIAL = 3
    #: A pass over the layers begins: ``unit`` says which, ``extra`` what of the frozen ones.
    BEGIN = 4
    #: A chunk of parameters, the ``extra``-th of the stream; and how many of them a worker
    #: (``unit``) has taken.
    PARAMETERS = 5
    TAKEN = 6
    #: A chunk of gradients of a step; and that the server has it in its files.
    GRADIENTS = 7
    APPLIED = 8
    #: All of a step is in the server's files.
    COMMITTED = 9
    #: What the server counts, asked for by worker 0 and answered as JSON.
    COUNT = 10
    COUNTS = 11
    #: A sign of life; that a worker has no more to do, or all of them; what went wrong, which ends
    #: the run.
    BEAT = 12
    LEAVE = 13
    ABORT = 14


class Malformed(ValueError):
    """What came is no message."""


@dataclass(frozen=True)
class Message:
    """One message; what its numbers mean depends on its kind."""

    kind: Kind
    step: int = 0
    unit: int = 0
    chunk: int = 0
    extra: int = 0
    payload: Any = b""

    def frames(self) -> list[Any]:
        """What is sent."""
        header = _HEADER.pack(_MAGIC, self.kind, self.step, self.unit, self.chunk, self.extra)
        return [header, self.payload]


def read(frames: Sequence[Any]) -> Message:
    """The message in these frames. Raises ``Malformed``."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise Malformed(f"{len(frames)} frames that are no message")
    magic, kind, step, unit, chunk, extra = _HEADER.unpack(frames[0])
    if magic != _MAGIC or kind not in Kind.__members__.values():
        raise Malformed("a header that is no message's")
    return Message(Kind(kind), step, unit, chunk, extra, frames[1])


def tensor(payload: Any, dtype: torch.dtype) -> torch.Tensor:
    """A payload as a flat tensor with memory of its own."""
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def reason_of(message: Message) -> str:
    """Why the run ends."""
    return bytes(message.payload).decode(errors="replace")

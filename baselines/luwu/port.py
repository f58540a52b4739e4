"""A worker's end: ``push``, ``pull`` and ``wait``; a thread of its own sends and receives.

At most two layers have memory: the one that was pulled last and the one after it. Chunks of a third
wait as messages, at most a window of them, until a layer is released.
"""

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baselines.luwu import LAYERS, WINDOW, wire
from baselines.luwu.plan import Chunk, Frozen, Pass, Plan
from fcdp.checksum import bytes_of

#: Takes a chunk's bytes to where they belong.
Land = Callable[[Chunk, Any], None]


@dataclass(eq=False)
class _Slot:
    """A layer that a pass needs, on its way or here."""

    layer: int
    #: Chunks that have not landed.
    chunks: deque[Chunk]


class Port(wire.Role):
    """One worker's connection to the switch."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        keys: wire.Keys,
        address: str,
        land: Land,
        patience_s: float = wire.PATIENCE_S,
    ) -> None:
        """Connect, and wait for the server's welcome. Raises ``Lost`` where it does not come."""
        super().__init__([wire.SWITCH], patience_s)
        self._plan = plan
        self._rank = rank
        self._land = land
        self._connection = wire.Connection(keys, address, wire.worker_name(rank))
        self._outbox = wire.Inbox()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        #: Answers of the server to questions that are asked once, by kind.
        self._answers: dict[wire.Kind, wire.Message] = {}
        self._slots: deque[_Slot] = deque()
        #: Chunks that have come and may not land yet, and how many have landed.
        self._waiting: deque[wire.Message] = deque()
        self._landed = 0
        #: Chunks that were pushed and are not in the server's files.
        self._pushed = 0
        self._committed = -1
        self._thread = threading.Thread(target=self._serve, name="luwu-port", daemon=True)
        self._thread.start()
        self._outbox.put(wire.Message(wire.Kind.HELLO, payload=plan.model_dump_json().encode()))
        welcome = self._answer(wire.Kind.WELCOME)
        #: Whether the server has no parameters yet.
        self.wants_initial = bool(welcome.extra)
        #: The last complete step when this worker came.
        self.step = welcome.step
        if not self.wants_initial:
            self._committed = self.step

    def initial(self, chunk: Chunk, values: torch.Tensor) -> None:
        """Send a chunk of the initial parameters (numel, float32)."""
        self._send_bounded(wire.Kind.INITIAL, 0, chunk, values)

    def begin(self, order: Pass, frozen: Frozen, step: int) -> None:
        """Ask for a pass's layers, one after another, as they are after ``step``."""
        with self._changed:
            for layer, chunks in self._plan.stream(order, frozen):
                self._slots.append(_Slot(layer, deque(chunks)))
        self._outbox.put(wire.Message(wire.Kind.BEGIN, step, layer=order, extra=frozen))

    def pull(self, layer: int) -> None:
        """Wait for the next layer. Raises ``Lost``, and ``ValueError`` if it is not this one."""
        slot = self._slots[0]
        if slot.layer != layer:
            raise ValueError(
                f"model: block {layer} is used where {slot.layer} is next (0: what is outside "
                "of the blocks); allowed is what is outside, each block once in order, and the head"
            )
        self._until(lambda: not slot.chunks)

    def release(self) -> None:
        """Let the layer go that was pulled, so that the one after the next may come."""
        with self._changed:
            self._slots.popleft()
        self._outbox.put(None)

    def push(self, step: int, layer: int, gradients: torch.Tensor) -> None:
        """Send a layer's gradients, end to end; waits while too much is under way."""
        host = gradients.to("cpu")
        for chunk in self._plan.chunks(layer):
            if chunk.trained:
                part = host[chunk.begin : chunk.end]
                self._send_bounded(wire.Kind.GRADIENTS, step, chunk, part)

    def wait(self, step: int) -> None:
        """Wait until all of a step is in the server's files, and until nothing more is sent."""
        self._until(lambda: self._committed >= step)
        self._until(lambda: not any(slot.chunks for slot in [*self._slots][:LAYERS]))
        self._until(
            lambda: len(self._waiting) >= min(WINDOW, sum(len(s.chunks) for s in self._slots))
        )

    def counts(self) -> dict[str, int]:
        self._outbox.put(wire.Message(wire.Kind.COUNT))
        counts: dict[str, int] = json.loads(self._answer(wire.Kind.COUNTS).payload)
        return counts

    def close(self) -> None:
        """Leave; with the last worker the run ends for the switch and the server too."""
        self._outbox.put(wire.Message(wire.Kind.LEAVE))
        self._over = True
        self._thread.join()

    def _send_bounded(self, kind: wire.Kind, step: int, chunk: Chunk, values: torch.Tensor) -> None:
        self._until(lambda: self._pushed < WINDOW)
        with self._changed:
            self._pushed += 1
        payload = bytes(bytes_of(values.contiguous()))
        self._outbox.put(wire.Message(kind, step, chunk.layer, chunk.index, payload=payload))

    def _answer(self, kind: wire.Kind) -> wire.Message:
        self._until(lambda: kind in self._answers)
        return self._answers.pop(kind)

    def _until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or done())
            if self._error is not None:
                raise wire.Lost(f"worker {self._rank}: {self._error}") from self._error

    def _serve(self) -> None:
        hear = {self._connection.socket: self._hear_switch, self._outbox.fileno(): lambda: None}
        try:
            self._run(hear)
            self._go_on()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._connection.close()

    def _go_on(self) -> None:
        """Send messages of other threads, and land the chunks that fit."""
        for message in self._outbox.take():
            if message is not None:
                wire.send(self._connection.socket, message)
        self._land_waiting()

    def _beat(self) -> None:
        wire.send(self._connection.socket, wire.Message(wire.Kind.BEAT))

    def _hear_switch(self) -> None:
        self._note(wire.SWITCH)
        message = wire.read(self._connection.socket.recv_multipart())
        kind = message.kind
        with self._changed:
            if kind == wire.Kind.PARAMETERS:
                self._waiting.append(message)
            elif kind == wire.Kind.APPLIED:
                # It answers a chunk of this worker's: worker 0 alone pushes initial parameters.
                self._pushed -= self._committed >= 0 or self._rank == 0
            elif kind == wire.Kind.COMMITTED:
                self._committed = message.step
            elif kind in (wire.Kind.WELCOME, wire.Kind.COUNTS):
                self._answers[kind] = message
            elif kind == wire.Kind.ABORT:
                raise wire.Lost(wire.reason_of(message))
            self._changed.notify_all()

    def _land_waiting(self) -> None:
        """Take chunks of the two next layers to their memory, and say so."""
        while self._waiting:
            message = self._waiting[0]
            with self._changed:
                slot = next(slot for slot in self._slots if slot.chunks)
                if slot not in [*self._slots][:LAYERS]:
                    return
            chunk = slot.chunks[0]
            if (message.layer, message.chunk) != (chunk.layer, chunk.index):
                raise wire.Malformed("parameters of another layer than the one that is next")
            self._land(chunk, message.payload)
            self._waiting.popleft()
            self._landed += 1
            with self._changed:
                slot.chunks.popleft()
                self._changed.notify_all()
            taken = wire.Message(wire.Kind.TAKEN, layer=self._rank, extra=self._landed)
            wire.send(self._connection.socket, taken)

"""The switch: sums gradients, multicasts parameters, merges acknowledgements; keeps nothing.

``main`` is its process. It stands for two things of the paper: the FPGA network card beside each
GPU, and the programmable switch between them and the server. All that it has in hand is chunks on
their way, whose number the roles' windows bound.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from baselines.luwu import WINDOW, wire
from baselines.luwu.plan import Pass, Plan

#: Messages of the server that all workers hear.
_MULTICAST = (wire.Kind.WELCOME, wire.Kind.PARAMETERS, wire.Kind.APPLIED, wire.Kind.COMMITTED)


def main() -> None:
    """Run the switch between the workers and the server of one run.

    ``FCDP_SWITCH``: the address to listen on; ``FCDP_SERVER``; ``FCDP_RUN_SECRET``;
    ``WORLD_SIZE``: the number of workers.
    """
    keys = wire.Keys.of_environment()
    workers = int(os.environ["WORLD_SIZE"])
    connection = wire.Connection(keys, os.environ["FCDP_SERVER"], wire.SWITCH, workers)
    listener = wire.Listener(keys, os.environ["FCDP_SWITCH"])
    Switch(listener, connection, workers).serve()


class Switch(wire.Host):
    """One run's switch, in its loop."""

    def __init__(
        self,
        listener: wire.Listener,
        connection: wire.Connection,
        workers: int,
        patience_s: float = wire.PATIENCE_S,
    ) -> None:
        self._ranks = {wire.worker_name(rank): rank for rank in range(workers)}
        super().__init__(listener, self._ranks, patience_s)
        self._heard["server"] = None
        self._connection = connection
        self._server = connection.socket
        self._plan: Plan | None = None
        #: Messages that some workers have sent and not all: the window bounds how many those are.
        self._gathered: dict[Any, dict[int, Any]] = {}
        #: Chunks of parameters that each worker has taken, and that all have by the server's count.
        self._taken = dict.fromkeys(range(workers), 0)
        self._acknowledged = 0

    def serve(self) -> None:
        """Pass messages on until all workers have left, or tell all that a role is gone.

        Raises ``Lost`` for a role that is gone, and ``Malformed`` for what is no message.
        """
        try:
            self._run({self._socket: self._hear_guest, self._server: self._hear_server})
        except Exception as error:
            with suppress(wire.Lost):
                wire.send(self._server, wire.Message(wire.Kind.ABORT, payload=str(error).encode()))
            self.abort(str(error))
            raise
        finally:
            self._listener.close()
            self._connection.close()

    def _beat(self) -> None:
        self._to_all(wire.Message(wire.Kind.BEAT))
        wire.send(self._server, wire.Message(wire.Kind.BEAT))

    def _to_all(self, message: wire.Message) -> None:
        for name in sorted(self._here, key=self._ranks.__getitem__):
            self.say(name, message)

    def _hear_server(self) -> None:
        message = wire.read(self._server.recv_multipart())
        self._note("server")
        if message.kind == wire.Kind.ABORT:
            raise wire.Lost(wire.reason_of(message))
        elif message.kind == wire.Kind.COUNTS:
            self.say(wire.worker_name(0), message)
        elif message.kind in _MULTICAST:
            self._to_all(message)

    def _handle(self, name: str, frames: Sequence[Any]) -> None:
        try:
            self._take(name, self._ranks[name], wire.read(frames))
        except wire.Malformed as error:
            raise wire.Malformed(f"{name} sent {error}") from error

    def _take(self, name: str, rank: int, message: wire.Message) -> None:
        kind = message.kind
        key: tuple[int, ...]
        if kind == wire.Kind.GRADIENTS:
            key = kind, message.step, message.layer, message.chunk
            self._gather(key, rank, message, self._sum)
        elif kind in (wire.Kind.HELLO, wire.Kind.BEGIN):
            key = kind, message.step, message.layer, message.extra
            self._gather(key, rank, message, self._alike)
        elif kind == wire.Kind.TAKEN:
            self._merge(rank, message)
        elif kind == wire.Kind.LEAVE:
            self._leave(name)
        elif kind in (wire.Kind.INITIAL, wire.Kind.COUNT):
            wire.send(self._server, message)
        elif kind != wire.Kind.BEAT:
            raise wire.Malformed(f"{kind.name}, which is not a worker's")

    def _leave(self, name: str) -> None:
        """Expect nothing more of a worker; with the last one the run is over.

        Raises ``Lost`` where others wait for what it has not sent.
        """
        self._let_leave(name)
        for key in self._gathered:
            self._check_that_all_are_here(key)
        if self._left == self._guests:
            wire.send(self._server, wire.Message(wire.Kind.LEAVE))
            self._over = True

    def _gather(
        self, key: Any, rank: int, message: wire.Message, merge: Callable[[dict[int, Any]], Any]
    ) -> None:
        """Wait until all workers have sent theirs, then pass on one message."""
        self._check_that_all_are_here(key)
        payloads = self._gathered.setdefault(key, {})
        if rank in payloads or len(self._gathered) > 2 * WINDOW:
            raise wire.Malformed(f"{message.kind.name} twice, or more than the window allows")
        payloads[rank] = message.payload
        if len(payloads) == len(self._guests):
            del self._gathered[key]
            payload = merge(payloads)
            if message.kind == wire.Kind.HELLO:
                self._plan = Plan.model_validate_json(payload)
            wire.send(self._server, replace(message, payload=payload))

    def _check_that_all_are_here(self, key: tuple[int, ...]) -> None:
        """Raises ``Lost`` if a worker has left without its part of a step, or of the plan.

        A forward does not need it: the last one is asked for ahead of a step that never comes.
        """
        needed = key[0] in (wire.Kind.GRADIENTS, wire.Kind.HELLO) or (
            key[0] == wire.Kind.BEGIN and key[2] == Pass.BACKWARD
        )
        if self._left and needed:
            first = min(self._left, key=self._ranks.__getitem__)
            raise wire.Lost(f"{first} has left before the others were done")

    def _sum(self, payloads: dict[int, Any]) -> bytes:
        """Sum in the order of ranks, in float32, rounded once to the type that crosses."""
        if self._plan is None:
            raise wire.Malformed("gradients before HELLO")
        dtype = self._plan.type
        if len({len(payload) for payload in payloads.values()}) > 1:
            raise wire.Malformed("gradients of another size than other workers'")
        total = wire.tensor(payloads[0], dtype).to(torch.float32)
        for rank in range(1, len(payloads)):
            total += wire.tensor(payloads[rank], dtype)
        return total.to(dtype).view(torch.uint8).numpy().tobytes()

    def _alike(self, payloads: dict[int, Any]) -> Any:
        if len({bytes(payload) for payload in payloads.values()}) > 1:
            raise wire.Malformed("another plan than other workers: models or settings differ")
        return payloads[0]

    def _merge(self, rank: int, message: wire.Message) -> None:
        """Pass an acknowledgement on: each, or one when all workers have taken a chunk."""
        if self._plan is None or message.extra != self._taken[rank] + 1:
            raise wire.Malformed("TAKEN out of order")
        self._taken[rank] = message.extra
        if not self._plan.merged:
            wire.send(self._server, wire.Message(wire.Kind.TAKEN, layer=rank, extra=message.extra))
            return
        for count in range(self._acknowledged + 1, min(self._taken.values()) + 1):
            wire.send(self._server, wire.Message(wire.Kind.TAKEN, layer=wire.ALL, extra=count))
        self._acknowledged = min(self._taken.values())


if __name__ == "__main__":
    main()

"""The switch: sums gradients, multicasts parameters, merges acknowledgements; keeps nothing.

``main`` is its process. It stands for two things of the paper: the FPGA network card beside each
GPU, and the programmable switch between them and the server. All that it has in hand is chunks on
their way, whose number the roles' windows bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import zmq

from baselines.luwu import WINDOW
from baselines.luwu.plan import Pass, Plan
from baselines.luwu.server import SWITCH
from baselines.luwu.wire import (
    ALL,
    BEAT_S,
    PATIENCE_S,
    Connection,
    Keys,
    Kind,
    Listener,
    Lives,
    Lost,
    Malformed,
    Message,
    read,
    reason_of,
    send,
    tensor,
)

#: What the server says that all workers hear.
_MULTICAST = (Kind.WELCOME, Kind.PARAMETERS, Kind.APPLIED, Kind.COMMITTED)


def main() -> None:
    """Stand between the workers and the server of one run.

    ``FCDP_SWITCH``: the address to listen on; ``FCDP_SERVER``; ``FCDP_RUN_SECRET``;
    ``WORLD_SIZE``: the number of workers.
    """
    keys = Keys.of_environment()
    workers = int(os.environ["WORLD_SIZE"])
    connection = Connection(keys, os.environ["FCDP_SERVER"], SWITCH, workers)
    listener = Listener(keys, os.environ["FCDP_SWITCH"])
    serve(listener, connection, workers)


def worker_name(rank: int) -> str:
    """The name under which a worker connects."""
    return f"worker {rank}"


def serve(
    listener: Listener, connection: Connection, workers: int, patience_s: float = PATIENCE_S
) -> None:
    """Serve until all workers have left, or a role is gone, which all others are told then.

    Raises ``Lost`` for a role that is gone, and ``Malformed`` for what is no message.
    """
    switch = Switch(listener, connection, workers, patience_s)
    try:
        switch.run()
    except Exception as error:
        switch.abort(str(error))
        raise
    finally:
        listener.close()
        connection.close()


class Switch:
    """One run's switch, in its loop."""

    def __init__(
        self, listener: Listener, connection: Connection, workers: int, patience_s: float
    ) -> None:
        self._workers = listener.socket
        self._server = connection.socket
        self._names = {worker_name(rank).encode(): rank for rank in range(workers)}
        self._here: set[int] = set()
        self._left: set[int] = set()
        self._lives = Lives(["server", *map(worker_name, range(workers))], patience_s)
        self._plan: Plan | None = None
        #: What has come of some workers and not of all: the window bounds how much that is.
        self._gathered: dict[Any, dict[int, Any]] = {}
        #: How much of the parameters each worker has taken, and what the server knows of it.
        self._taken = dict.fromkeys(range(workers), 0)
        self._told = 0
        self._over = False

    def run(self) -> None:
        """Pass on what comes until the run is over."""
        poller = zmq.Poller()
        poller.register(self._workers, zmq.POLLIN)
        poller.register(self._server, zmq.POLLIN)
        while not self._over:
            for ready, _ in poller.poll(int(BEAT_S * 500)):
                if ready is self._workers:
                    self._hear_worker()
                else:
                    self._hear_server()
            if self._lives.is_due():
                self._to_all(Message(Kind.BEAT))
                send(self._server, Message(Kind.BEAT))
            self._lives.check()

    def abort(self, why: str) -> None:
        """Tell all roles, as far as they are there, why the run ends."""
        message = Message(Kind.ABORT, payload=why.encode())
        with suppress(Lost):
            send(self._server, message)
        for rank in sorted(self._here):
            with suppress(Lost):
                send(self._workers, message, worker_name(rank))

    def _to_all(self, message: Message) -> None:
        for rank in sorted(self._here):
            self._to(rank, message)

    def _to(self, rank: int, message: Message) -> None:
        """Send to a worker. Its last words may wait unread when it is gone: they say why."""
        try:
            send(self._workers, message, worker_name(rank))
        except Lost:
            while self._workers.poll(0):
                self._hear_worker()
            if rank not in self._left:
                raise

    def _hear_server(self) -> None:
        message = read(self._server.recv_multipart())
        self._lives.hear("server")
        if message.kind == Kind.ABORT:
            raise Lost(reason_of(message))
        elif message.kind == Kind.COUNTS:
            self._to(0, message)
        elif message.kind in _MULTICAST:
            self._to_all(message)

    def _hear_worker(self) -> None:
        name, *frames = self._workers.recv_multipart()
        rank = self._names.get(name)
        if rank is None:
            return  # has the run's key, and no business here
        if rank not in self._left:
            self._here.add(rank)
        self._lives.hear(worker_name(rank))
        try:
            message = read(frames)
            self._handle(rank, message)
        except Malformed as error:
            raise Malformed(f"{worker_name(rank)} sent {error}") from error

    def _handle(self, rank: int, message: Message) -> None:
        kind = message.kind
        key: tuple[int, ...]
        if kind == Kind.GRADIENTS:
            key = kind, message.step, message.unit, message.chunk
            self._gather(key, rank, message, self._sum)
        elif kind in (Kind.HELLO, Kind.BEGIN):
            key = kind, message.step, message.unit, message.extra
            self._gather(key, rank, message, self._alike)
        elif kind == Kind.TAKEN:
            self._merge(rank, message)
        elif kind == Kind.LEAVE:
            self._leave(rank)
        elif kind in (Kind.INITIAL, Kind.COUNT):
            send(self._server, message)
        elif kind != Kind.BEAT:
            raise Malformed(f"{kind.name}, which is not a worker's")

    def _leave(self, rank: int) -> None:
        """Expect nothing more of a worker; with the last one the run is over.

        Raises ``Lost`` where others wait for what it has not sent.
        """
        self._here.discard(rank)
        self._left.add(rank)
        self._lives.forget(worker_name(rank))
        for key in self._gathered:
            self._check_that_all_are_here(key)
        if len(self._left) == len(self._names):
            send(self._server, Message(Kind.LEAVE))
            self._over = True

    def _gather(
        self, key: Any, rank: int, message: Message, merge: Callable[[dict[int, Any]], Any]
    ) -> None:
        """Wait until all workers have sent theirs, then pass on one message."""
        self._check_that_all_are_here(key)
        found = self._gathered.setdefault(key, {})
        if rank in found or len(self._gathered) > 2 * WINDOW:
            raise Malformed(f"{message.kind.name} twice, or more than the window allows")
        found[rank] = message.payload
        if len(found) == len(self._names):
            del self._gathered[key]
            payload = merge(found)
            if message.kind == Kind.HELLO:
                self._plan = Plan.model_validate_json(payload)
            send(
                self._server,
                Message(
                    message.kind, message.step, message.unit, message.chunk, message.extra, payload
                ),
            )

    def _check_that_all_are_here(self, key: tuple[int, ...]) -> None:
        """Raises ``Lost`` if a worker has left without its part of a step, or of the plan.

        Not of a forward that is asked for: the last is asked for ahead, and none comes to it.
        """
        needed = key[0] in (Kind.GRADIENTS, Kind.HELLO) or (
            key[0] == Kind.BEGIN and key[2] == Pass.BACKWARD
        )
        if self._left and needed:
            raise Lost(f"{worker_name(min(self._left))} has left before the others were done")

    def _sum(self, payloads: dict[int, Any]) -> bytes:
        """Sum in the order of ranks, in float32, rounded once to what crosses."""
        if self._plan is None:
            raise Malformed("gradients before HELLO")
        dtype = self._plan.type
        if len({len(payload) for payload in payloads.values()}) > 1:
            raise Malformed("gradients of another size than other workers'")
        total = tensor(payloads[0], dtype).to(torch.float32)
        for rank in range(1, len(payloads)):
            total += tensor(payloads[rank], dtype)
        return total.to(dtype).view(torch.uint8).numpy().tobytes()

    def _alike(self, payloads: dict[int, Any]) -> Any:
        if len({bytes(payload) for payload in payloads.values()}) > 1:
            raise Malformed("another plan than other workers: models or settings differ")
        return payloads[0]

    def _merge(self, rank: int, message: Message) -> None:
        """Pass an acknowledgement on: each, or one when all workers have taken a chunk."""
        if self._plan is None or message.extra != self._taken[rank] + 1:
            raise Malformed("TAKEN out of order")
        self._taken[rank] = message.extra
        if not self._plan.merged:
            send(self._server, Message(Kind.TAKEN, unit=rank, extra=message.extra))
            return
        for count in range(self._told + 1, min(self._taken.values()) + 1):
            send(self._server, Message(Kind.TAKEN, unit=ALL, extra=count))
        self._told = min(self._taken.values())


if __name__ == "__main__":
    main()

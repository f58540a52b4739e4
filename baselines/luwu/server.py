"""The server: it has all state in files, sends parameters, and steps AdamW as gradients come.

``main`` is its process. What it sends comes from a thread that reads ahead in the order of the
passes; what it receives goes into the pipeline. Both are bounded by what is not acknowledged.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import zmq

from baselines.links import interface_bytes
from baselines.luwu import WINDOW
from baselines.luwu.files import Buffer, Files
from baselines.luwu.pipeline import Item, LayerCentric, StepCentric, Steps
from baselines.luwu.plan import Chunk, Frozen, Pass, Plan
from baselines.luwu.wire import (
    ALL,
    BEAT_S,
    PATIENCE_S,
    Inbox,
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

SWITCH = "switch"


def main() -> None:
    """Serve one run: the launcher says by the environment where, and ends the process.

    ``FCDP_SERVER``: the address to listen on; ``FCDP_RUN_SECRET``; ``FCDP_STATE``: the folder of
    the files, by default one among temporary files.
    """
    keys = Keys.of_environment()
    folder = Path(os.environ.get("FCDP_STATE") or Path(tempfile.gettempdir()) / "luwu")
    serve(Listener(keys, os.environ["FCDP_SERVER"]), folder)


def serve(listener: Listener, folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Serve until the switch says that the run is over.

    Raises ``Lost`` where the switch is gone, and what a file or a message was refused for.
    """
    server = Server(listener, folder, patience_s)
    try:
        server.run()
    except Exception as error:
        server.abort(f"server: {error}")
        raise
    finally:
        server.close()
        listener.close()


class Server:
    """One run's server, in its loop."""

    def __init__(self, listener: Listener, folder: Path, patience_s: float) -> None:
        self._socket = listener.socket
        self._folder = folder
        self._inbox = Inbox()
        self._lives = Lives([SWITCH], patience_s)
        self._met = False
        self._gone = False
        self._run: _Run | None = None
        self._received = 0
        self._over = False

    def run(self) -> None:
        """Handle what comes until the run is over."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inbox, zmq.POLLIN)
        while not self._over:
            for ready, _ in poller.poll(int(BEAT_S * 500)):
                if ready is self._socket:
                    self._receive()
                else:
                    for item in self._inbox.take():
                        self._take(item)
            if self._run is not None:
                self._run.send_ahead(self.say)
            if self._lives.is_due():
                self.say(Message(Kind.BEAT))
            self._lives.check()

    def say(self, message: Message) -> None:
        """Send to the switch, if it has come. Its last words may wait unread when it is gone."""
        if not self._met or self._gone:
            return
        try:
            send(self._socket, message, SWITCH)
        except Lost:
            self._gone = True  # and is answered nothing
            while self._socket.poll(0):
                self._receive()
            if not self._over:
                raise

    def abort(self, why: str) -> None:
        """Tell the switch, as far as it is there, why the run ends."""
        if self._met:
            with suppress(Lost):
                send(self._socket, Message(Kind.ABORT, payload=why.encode()), SWITCH)

    def close(self) -> None:
        """Have all threads end, and the files closed."""
        if self._run is not None:
            self._run.close()

    def _receive(self) -> None:
        name, *frames = self._socket.recv_multipart()
        if name != SWITCH.encode():
            return  # has the run's key, and no business here
        self._met = True
        self._lives.hear(SWITCH)
        message = read(frames)
        if message.kind == Kind.HELLO:
            self._hello(message)
        elif message.kind == Kind.ABORT:
            raise Lost(reason_of(message))
        elif message.kind == Kind.LEAVE:
            self._over = True
        elif message.kind == Kind.COUNT:
            self.say(Message(Kind.COUNTS, payload=json.dumps(self._counts()).encode()))
        elif message.kind != Kind.BEAT:
            self._received += 1
            if self._run is None:
                raise Malformed(f"{message.kind.name} before HELLO")
            for answer in self._run.handle(message):
                self.say(answer)

    def _hello(self, message: Message) -> None:
        if self._run is not None:
            raise Malformed("a second HELLO")
        plan = Plan.model_validate_json(message.payload)
        self._run = _Run(plan, Files(self._folder, plan), self._inbox)
        step = self._run.files.step
        self.say(Message(Kind.WELCOME, step=step or 0, extra=step is None))

    def _take(self, item: Any) -> None:
        """Take what a thread has handed over: a chunk to send, one that is applied, an error."""
        if isinstance(item, BaseException):
            raise item
        assert self._run is not None
        if isinstance(item, Message):
            self._run.ahead.append(item)
            return
        done, complete = item
        self.say(Message(Kind.APPLIED, step=done.step, unit=done.chunk.unit))
        if complete:
            self.say(Message(Kind.COMMITTED, step=done.step + 1))

    def _counts(self) -> dict[str, int]:
        """What is counted since the server began: messages beside signs of life, bytes."""
        counts = {"messages": self._received}
        if self._run is not None:
            files = self._run.files
            counts |= {"file_read": files.read, "file_written": files.written}
        if interface := os.environ.get("FCDP_INTERFACE"):
            received, sent = interface_bytes(interface)
            counts |= {"received": received, "sent": sent}
        return counts


class _Run:
    """What the server has once it knows the plan."""

    def __init__(self, plan: Plan, files: Files, inbox: Inbox) -> None:
        self.plan = plan
        self.files = files
        #: Chunks that have been read and not sent.
        self.ahead: deque[Message] = deque()
        self._chunks = {(c.unit, c.index): c for c in plan.all_chunks()}
        self._steps = Steps(plan, files, lambda *done: inbox.put(done), inbox.put)
        self._pipeline = (
            StepCentric(self._steps, plan.threads)
            if plan.pipeline == "step"
            else LayerCentric(self._steps, plan.threads, plan)
        )
        self._buffer = Buffer(plan)
        self._sent = 0
        #: How much of the stream each worker has taken.
        self._taken = dict.fromkeys(range(plan.workers), 0)
        self._reader = _Reader(plan, files, inbox)

    def handle(self, message: Message) -> list[Message]:
        """Take a message of the workers'; return what is to be answered."""
        kind = message.kind
        if kind == Kind.INITIAL:
            return self._initial(message)
        if kind == Kind.BEGIN:
            stream = self.plan.stream(Pass(message.unit), Frozen(message.extra))
            self._reader.begin([chunk for _, chunks in stream for chunk in chunks], message.step)
        elif kind == Kind.TAKEN:
            workers = [*self._taken] if message.unit == ALL else [message.unit]
            for worker in workers:
                if worker not in self._taken or message.extra > self._sent:
                    raise Malformed("TAKEN by a worker that there is not, or what was not sent")
                self._taken[worker] = message.extra
        elif kind == Kind.GRADIENTS:
            chunk = self._chunk(message, self.plan.type.itemsize)
            self._pipeline.submit(Item(chunk, message.step, message.payload))
        else:
            raise Malformed(f"{kind.name} is not for the server")
        return []

    def send_ahead(self, say: Any) -> None:
        """Send what has been read, as far as all workers have room for it."""
        while self.ahead and self._sent - min(self._taken.values()) < WINDOW:
            say(self.ahead.popleft())
            self._sent += 1
            self._reader.room.release()

    def close(self) -> None:
        """Have the threads end."""
        self.files.end()
        self._steps.end()
        self._pipeline.end()
        self._reader.end()
        self.files.close()

    def _initial(self, message: Message) -> list[Message]:
        chunk = self._chunk(message, torch.float32.itemsize)
        values = tensor(message.payload, torch.float32)
        if chunk.trained:
            states = self._buffer.states(chunk.numel)
            for state, value in zip(states, (values, 0.0, 0.0), strict=True):
                state.copy_(torch.as_tensor(value))
            self._buffer.parameters(chunk.numel, self.plan.type).copy_(values)
        else:
            nbytes = chunk.numel * self.plan.type.itemsize
            self._buffer.memory[:nbytes].view(self.plan.type).copy_(values)
        complete = self.files.write(chunk, 0, self._buffer)
        answers = [Message(Kind.APPLIED, unit=chunk.unit)]
        return [*answers, Message(Kind.COMMITTED)] if complete else answers

    def _chunk(self, message: Message, itemsize: int) -> Chunk:
        """The chunk that a message brings. Raises ``Malformed`` for one that there is not."""
        chunk = self._chunks.get((message.unit, message.chunk))
        size = None if chunk is None else chunk.numel * itemsize
        if chunk is None or len(message.payload) != size:
            raise Malformed(
                f"{message.kind.name} of unit {message.unit}, chunk {message.chunk}, "
                f"{len(message.payload)} bytes: not in the plan"
            )
        return chunk


class _Reader:
    """A thread that reads the passes' chunks ahead, each once it has the step that is asked for."""

    def __init__(self, plan: Plan, files: Files, inbox: Inbox) -> None:
        self._files = files
        self._inbox = inbox
        self._buffer = Buffer(plan)
        self._wanted: deque[tuple[Chunk, int]] = deque()
        self._any = threading.Semaphore(0)
        #: Chunks that may be read and not sent.
        self.room = threading.Semaphore(WINDOW)
        self._count = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="luwu-reader", daemon=True)
        self._thread.start()

    def begin(self, chunks: list[Chunk], step: int) -> None:
        """Read these too, as they are after ``step``."""
        for chunk in chunks:
            self._wanted.append((chunk, step))
            self._any.release()

    def end(self) -> None:
        """End the thread."""
        self._ended = True
        self._any.release()
        self.room.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._any.acquire()
                self.room.acquire()
                if self._ended:
                    return
                chunk, step = self._wanted.popleft()
                payload = bytes(self._files.parameters(chunk, step, self._buffer))
                message = Message(
                    Kind.PARAMETERS, step, chunk.unit, chunk.index, self._count, payload
                )
                self._count += 1
                self._inbox.put(message)
        except Exception as error:
            self._inbox.put(error)


if __name__ == "__main__":
    main()

"""The server: it has all state in files, sends parameters, and steps AdamW as gradients come.

``main`` is its process. A thread reads parameters ahead in the order of the passes; gradients that
come go into the pipeline. Chunks that are not acknowledged yet bound both.
"""

import json
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from baselines.links import interface_bytes
from baselines.luwu import WINDOW, wire
from baselines.luwu.files import Buffer, Files
from baselines.luwu.plan import Chunk, Frozen, Pass, Plan
from baselines.part import step_adamw


@dataclass(eq=False)
class Item:
    """One chunk of one step's gradients, and what becomes of it."""

    chunk: Chunk
    #: The step that is complete before it.
    step: int
    gradients: Any
    buffer: Buffer


class Pipeline:
    """Threads that take chunks through read, Adam, cast and write.

    *Step-centric* (the paper's): each does one of these for the chunks of all layers.
    *Layer-centric*, with as many: each does all of them for the chunks of its layers.
    """

    def __init__(
        self, plan: Plan, files: Files, tell: Callable[[wire.Message | BaseException], None]
    ) -> None:
        """``tell``: called with a message to the workers about a chunk, or with an error."""
        self._plan = plan
        self._files = files
        self._tell = tell
        self._broken = False
        #: One for each chunk that may be under way; a failed one keeps its own.
        self._buffers = deque(Buffer(plan) for _ in range(WINDOW))
        self._order = (self._read, self._adam, self._cast, self._write)
        self._by_step = plan.pipeline == "step"
        #: Step-centric: one each reads, casts and writes, and the others step.
        counts = [1, plan.threads - 3, 1, 1] if self._by_step else [1] * plan.threads
        self._threads = [
            ThreadPoolExecutor(count, "luwu-pipeline", torch.set_num_threads, (1,))
            for count in counts
        ]

    def submit(self, chunk: Chunk, step: int, gradients: Any) -> None:
        """Take a chunk's gradients; all of a layer's come before any of it comes again."""
        if self._broken:
            return
        item = Item(chunk, step, gradients, self._buffers.popleft())
        if self._by_step:
            self._threads[0].submit(self._take_on, item, 0)
        else:
            self._threads[chunk.layer % self._plan.threads].submit(self._do, item, *self._order)

    def end(self) -> None:
        """End the threads, each after the item that it is working on."""
        for threads in self._threads:
            threads.shutdown()

    def _take_on(self, item: Item, place: int) -> None:
        """Do one operation on a chunk, and hand it on to the threads of the next."""
        self._do(item, self._order[place])
        if not self._broken and place + 1 < len(self._order):
            self._threads[place + 1].submit(self._take_on, item, place + 1)

    def _do(self, item: Item, *order: Callable[[Item], None]) -> None:
        """Do these operations on a chunk, unless one has failed."""
        try:
            for operation in order:
                if not self._broken:
                    operation(item)
        except Exception as error:
            self._broken = True
            self._tell(error)

    def _read(self, item: Item) -> None:
        self._files.read_states(item.chunk, item.step, item.buffer)

    def _adam(self, item: Item) -> None:
        """Step the master by the mean gradients."""
        plan = self._plan
        gradients = wire.tensor(item.gradients, plan.type).float()
        item.gradients = None
        gradients /= plan.workers
        states = [[state] for state in item.buffer.states(item.chunk.numel)]
        chosen, rate = plan.optimizer, plan.learning_rate
        step_adamw(chosen, rate, item.step, [gradients], states, fused=False)

    def _cast(self, item: Item) -> None:
        """Round the master to the type that workers compute in."""
        numel = item.chunk.numel
        item.buffer.parameters(numel, self._plan.type).copy_(item.buffer.states(numel)[0])

    def _write(self, item: Item) -> None:
        """Write all of the chunk to the other generation, once nobody needs what is there."""
        complete = self._files.write(item.chunk, item.step + 1, item.buffer)
        self._buffers.append(item.buffer)
        self._tell(wire.Message(wire.Kind.APPLIED, step=item.step, layer=item.chunk.layer))
        if complete:
            self._tell(wire.Message(wire.Kind.COMMITTED, step=item.step + 1))


def main() -> None:
    """Serve one run; the launcher says where in the environment, and ends the process.

    ``FCDP_SERVER``: the address to listen on; ``FCDP_RUN_SECRET``; ``FCDP_STATE``: the folder of
    the files, by default one among temporary files.
    """
    keys = wire.Keys.of_environment()
    folder = Path(os.environ.get("FCDP_STATE") or Path(tempfile.gettempdir()) / "luwu")
    Server(wire.Listener(keys, os.environ["FCDP_SERVER"]), folder).serve()


class Server(wire.Host):
    """One run's server, in its loop."""

    def __init__(
        self, listener: wire.Listener, folder: Path, patience_s: float = wire.PATIENCE_S
    ) -> None:
        super().__init__(listener, [wire.SWITCH], patience_s)
        self._folder = folder
        self._inbox = wire.Inbox()
        self._received = 0
        #: The plan, once it is known; only then there are files, threads and their memory.
        self._plan: Plan | None = None
        #: Chunks that have been read and not sent, and how many have been sent.
        self._ahead: deque[wire.Message] = deque()
        self._sent = 0
        #: How many chunks the reader may read that are not sent, and how many it has read.
        self._room = threading.Semaphore(WINDOW)
        self._read = 0
        self._ended = False

    def serve(self) -> None:
        """Handle what comes until the switch says that the run is over.

        Raises ``Lost`` where the switch is gone, and the error of a refused file or message.
        """
        try:
            self._run({self._socket: self._hear_guest, self._inbox.fileno(): self._take_items})
        except Exception as error:
            self.abort(f"server: {error}")
            raise
        finally:
            if self._plan is not None:
                self._end_threads()
            self._listener.close()

    def _go_on(self) -> None:
        """Send what has been read, as far as all workers have room for it."""
        while self._ahead and self._sent - min(self._taken.values()) < WINDOW:
            self._say(self._ahead.popleft())
            self._sent += 1
            self._room.release()

    def _beat(self) -> None:
        self._say(wire.Message(wire.Kind.BEAT))

    def _say(self, message: wire.Message) -> None:
        self.say(wire.SWITCH, message)

    def _handle(self, name: str, frames: Sequence[Any]) -> None:
        message = wire.read(frames)
        if message.kind == wire.Kind.HELLO:
            self._hello(message)
        elif message.kind == wire.Kind.ABORT:
            raise wire.Lost(wire.reason_of(message))
        elif message.kind == wire.Kind.LEAVE:
            self._let_leave(name)
            self._over = True
        elif message.kind == wire.Kind.COUNT:
            self._say(wire.Message(wire.Kind.COUNTS, payload=json.dumps(self._counts()).encode()))
        elif message.kind != wire.Kind.BEAT:
            self._received += 1
            if self._plan is None:
                raise wire.Malformed(f"{message.kind.name} before HELLO")
            self._take(message, self._plan)

    def _hello(self, message: wire.Message) -> None:
        if self._plan is not None:
            raise wire.Malformed("a second HELLO")
        plan = Plan.model_validate_json(message.payload)
        self._files = Files(self._folder, plan)
        self._chunks = {(c.layer, c.index): c for c in plan.all_chunks()}
        #: How much of the stream each worker has taken.
        self._taken = dict.fromkeys(range(plan.workers), 0)
        self._pipeline = Pipeline(plan, self._files, self._inbox.put)
        self._buffer = Buffer(plan)
        #: A thread that reads ahead, each chunk once it has the step that is asked for.
        self._reader = ThreadPoolExecutor(1, "luwu-reader")
        self._read_into = Buffer(plan)
        self._plan = plan
        step = self._files.step
        self._say(wire.Message(wire.Kind.WELCOME, step=step or 0, extra=step is None))

    def _take_items(self) -> None:
        """Take what threads have handed over: chunks to send, what is applied, an error."""
        for item in self._inbox.take():
            if isinstance(item, BaseException):
                raise item
            if item.kind == wire.Kind.PARAMETERS:
                self._ahead.append(item)
            else:
                self._say(item)

    def _counts(self) -> dict[str, int]:
        """Counts since the server began: messages but for signs of life, and bytes."""
        counts = {"messages": self._received}
        if self._plan is not None:
            counts |= {"file_read": self._files.read, "file_written": self._files.written}
        if interface := os.environ.get("FCDP_INTERFACE"):
            received, sent = interface_bytes(interface)
            counts |= {"received": received, "sent": sent}
        return counts

    def _take(self, message: wire.Message, plan: Plan) -> None:
        """Handle a message from the workers."""
        kind = message.kind
        if kind == wire.Kind.INITIAL:
            self._initial(message, plan)
        elif kind == wire.Kind.BEGIN:
            stream = plan.stream(Pass(message.layer), Frozen(message.extra))
            for chunk in chain.from_iterable(chunks for _, chunks in stream):
                self._reader.submit(self._read_ahead, chunk, message.step)
        elif kind == wire.Kind.TAKEN:
            workers = [*self._taken] if message.layer == wire.ALL else [message.layer]
            for worker in workers:
                if worker not in self._taken or message.extra > self._sent:
                    raise wire.Malformed(
                        "TAKEN by a worker that there is not, or what was not sent"
                    )
                self._taken[worker] = message.extra
        elif kind == wire.Kind.GRADIENTS:
            chunk = self._chunk(message, plan.type.itemsize)
            self._pipeline.submit(chunk, message.step, message.payload)
        else:
            raise wire.Malformed(f"{kind.name} is not for the server")

    def _end_threads(self) -> None:
        self._files.end()
        self._pipeline.end()
        self._ended = True
        self._room.release()
        self._reader.shutdown(cancel_futures=True)
        self._files.close()

    def _read_ahead(self, chunk: Chunk, step: int) -> None:
        self._room.acquire()
        if self._ended:
            return
        try:
            payload = bytes(self._files.parameters(chunk, step, self._read_into))
        except Exception as error:
            self._ended = True
            self._inbox.put(error)
            return
        where = step, chunk.layer, chunk.index, self._read
        self._inbox.put(wire.Message(wire.Kind.PARAMETERS, *where, payload))
        self._read += 1

    def _initial(self, message: wire.Message, plan: Plan) -> None:
        chunk = self._chunk(message, torch.float32.itemsize)
        values = wire.tensor(message.payload, torch.float32)
        if chunk.trained:
            states = self._buffer.states(chunk.numel)
            for state, value in zip(states, (values, 0.0, 0.0), strict=True):
                state.copy_(torch.as_tensor(value))
            self._buffer.parameters(chunk.numel, plan.type).copy_(values)
        else:
            nbytes = chunk.numel * plan.type.itemsize
            self._buffer.memory[:nbytes].view(plan.type).copy_(values)
        complete = self._files.write(chunk, 0, self._buffer)
        self._say(wire.Message(wire.Kind.APPLIED, layer=chunk.layer))
        if complete:
            self._say(wire.Message(wire.Kind.COMMITTED))

    def _chunk(self, message: wire.Message, itemsize: int) -> Chunk:
        """The chunk that a message brings. Raises ``Malformed`` for one that is not in the plan."""
        chunk = self._chunks.get((message.layer, message.chunk))
        size = None if chunk is None else chunk.numel * itemsize
        if chunk is None or len(message.payload) != size:
            raise wire.Malformed(
                f"{message.kind.name} of layer {message.layer}, chunk {message.chunk}, "
                f"{len(message.payload)} bytes: not in the plan"
            )
        return chunk


if __name__ == "__main__":
    main()

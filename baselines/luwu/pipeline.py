"""The server's optimizer: chunks on their way through read, Adam, cast and write.

*Step-centric* (the paper's): each thread does one of these for the chunks of all layers.
*Layer-centric*, with as many threads: each takes a layer, and does all of them for its chunks.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from baselines.luwu import WINDOW
from baselines.luwu.files import Buffer, Files
from baselines.luwu.plan import Chunk, Plan
from baselines.luwu.wire import tensor

_BETA1, _EPSILON = 0.9, 1e-8


@dataclass(eq=False)
class Item:
    """One chunk of one step's gradients, and what becomes of it."""

    chunk: Chunk
    #: The step that is complete before it.
    step: int
    gradients: Any
    buffer: Buffer | None = None


class Pipeline:
    """Threads that do with each chunk what is to be done, one thing after another."""

    def __init__(
        self,
        plan: Plan,
        files: Files,
        done: Callable[[Item, bool], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """``done``: called with each item, and whether it completes its step."""
        self._plan = plan
        self._files = files
        self._done = done
        self._failed = failed
        self._broken = False
        #: As many as may be under way: nobody waits for one for ever.
        self._buffers: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        for _ in range(WINDOW):
            self._buffers.put(Buffer(plan))
        self._order = (self._read, self._adam, self._cast, self._write)
        #: Step-centric: one thread each reads, casts and writes, and the others step.
        counts = (1, plan.threads - 3, 1, 1) if plan.pipeline == "step" else (plan.threads,)
        self._threads = [
            ThreadPoolExecutor(count, "luwu-pipeline", torch.set_num_threads, (1,))
            for count in counts
        ]
        #: Layers some of whose chunks have come, how many have not; and what a thread does with
        #: them. ``None``: no more will come.
        self._open: dict[int, tuple[queue.SimpleQueue[Item | None], int]] = {}

    def submit(self, item: Item) -> None:
        """Take a chunk; all of a layer's come before any of it comes again."""
        if self._plan.pipeline == "step":
            self._threads[0].submit(self._take_on, item, 0)
            return
        unit = item.chunk.unit
        if unit not in self._open:
            count = sum(chunk.trained for chunk in self._plan.chunks(unit))
            self._open[unit] = queue.SimpleQueue(), count
            self._threads[0].submit(self._take_layer, self._open[unit][0], count)
        items, left = self._open.pop(unit)
        items.put(item)
        if left > 1:
            self._open[unit] = items, left - 1

    def end(self) -> None:
        """Have the threads end, each with what it has in hand."""
        for _ in range(WINDOW):
            self._buffers.put(None)  # a failed step has kept what somebody waits for
        for items, _ in self._open.values():
            items.put(None)
        for threads in self._threads:
            threads.shutdown()

    def _take_on(self, item: Item, place: int) -> None:
        """Do one thing with a chunk, and hand it on to the threads that do the next."""
        if self._do(item, place) and place + 1 < len(self._order):
            self._threads[place + 1].submit(self._take_on, item, place + 1)

    def _take_layer(self, items: queue.SimpleQueue[Item | None], count: int) -> None:
        for _ in range(count):
            item = items.get()
            if item is None:
                return
            for place in range(len(self._order)):
                self._do(item, place)

    def _do(self, item: Item, place: int) -> bool:
        """Whether it is done: nothing is after something has failed."""
        try:
            if not self._broken:
                self._order[place](item)
        except Exception as error:
            self._broken = True
            self._failed(error)
        return not self._broken

    def _read(self, item: Item) -> None:
        """Read master and moments."""
        item.buffer = self._buffers.get()
        if item.buffer is None:
            raise RuntimeError("the run has ended")
        self._files.read_states(item.chunk, item.step, item.buffer)

    def _adam(self, item: Item) -> None:
        """Step the master by the mean gradients: PyTorch's AdamW."""
        plan, buffer = self._plan, item.buffer
        assert buffer is not None
        gradients = tensor(item.gradients, plan.type).float()
        item.gradients = None
        gradients /= plan.workers
        master, first, second = buffer.states(item.chunk.numel)
        adamw(
            [master],
            [gradients],
            [first],
            [second],
            [],
            [torch.tensor(float(item.step))],
            foreach=True,
            amsgrad=False,
            beta1=_BETA1,
            beta2=plan.optimizer.beta2,
            lr=plan.learning_rate * plan.optimizer.rate(item.step),
            weight_decay=plan.optimizer.weight_decay,
            eps=_EPSILON,
            maximize=False,
        )

    def _cast(self, item: Item) -> None:
        """Round the master to what workers compute with."""
        assert item.buffer is not None
        numel = item.chunk.numel
        item.buffer.parameters(numel, self._plan.type).copy_(item.buffer.states(numel)[0])

    def _write(self, item: Item) -> None:
        """Write all of the chunk to the other generation, once nobody needs what is there."""
        assert item.buffer is not None
        complete = self._files.write(item.chunk, item.step + 1, item.buffer)
        self._buffers.put(item.buffer)
        self._done(item, complete)

"""The server's optimizer: chunks on their way through read, Adam, cast and write.

*Step-centric* (the paper's): each thread does one of these for the chunks of all layers.
*Layer-centric*, with as many threads: each takes a layer, and does all of them for its chunks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
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


class Steps:
    """What is done with a chunk, one method per step."""

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
        self.failed = failed
        #: As many as may be under way: nobody waits for one for ever.
        self._buffers: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()
        for _ in range(WINDOW):
            self._buffers.put(Buffer(plan))

    def read(self, item: Item) -> None:
        """Read master and moments."""
        item.buffer = self._buffers.get()
        if item.buffer is None:
            raise RuntimeError("the run has ended")
        self._files.read_states(item.chunk, item.step, item.buffer)

    def end(self) -> None:
        """Have nobody wait for a buffer that a failed step has kept."""
        for _ in range(WINDOW):
            self._buffers.put(None)

    def adam(self, item: Item) -> None:
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

    def cast(self, item: Item) -> None:
        """Round the master to what workers compute with."""
        assert item.buffer is not None
        numel = item.chunk.numel
        item.buffer.parameters(numel, self._plan.type).copy_(item.buffer.states(numel)[0])

    def write(self, item: Item) -> None:
        """Write all of the chunk to the other generation, once nobody needs what is there."""
        assert item.buffer is not None
        complete = self._files.write(item.chunk, item.step + 1, item.buffer)
        self._buffers.put(item.buffer)
        self._done(item, complete)


class StepCentric:
    """One thread each reads, casts and writes; the others step."""

    def __init__(self, steps: Steps, threads: int) -> None:
        order = (steps.read, steps.adam, steps.cast, steps.write)
        counts = (1, threads - 3, 1, 1)
        self._queues: list[_Items] = [queue.SimpleQueue() for _ in order]
        self.submit = self._queues[0].put
        self._threads: list[list[threading.Thread]] = []
        for index, (step, count) in enumerate(zip(order, counts, strict=True)):
            onward = self._queues[index + 1].put if index + 1 < len(order) else None
            arguments = (self._queues[index], step, onward, steps.failed)
            self._threads.append([_start(_run_step, *arguments) for _ in range(count)])

    def end(self) -> None:
        """Have the threads end, each with what it has in hand."""
        for items, threads in zip(self._queues, self._threads, strict=True):
            _end(items, threads)


class LayerCentric:
    """Each thread takes the next layer whose gradients come, and does all steps of its chunks."""

    def __init__(self, steps: Steps, threads: int, plan: Plan) -> None:
        self._chunks = [sum(c.trained for c in plan.chunks(u)) for u in range(len(plan.units))]
        self._open: dict[int, tuple[_Items, int]] = {}
        self._layers: queue.SimpleQueue[tuple[_Items, int] | None] = queue.SimpleQueue()
        self._threads = [_start(_run_layers, self._layers, steps) for _ in range(threads)]

    def submit(self, item: Item) -> None:
        """Take a chunk; all of a layer's come before any of it comes again."""
        unit = item.chunk.unit
        if unit not in self._open:
            self._open[unit] = queue.SimpleQueue(), self._chunks[unit]
            self._layers.put(self._open[unit])
        items, left = self._open.pop(unit)
        items.put(item)
        if left > 1:
            self._open[unit] = items, left - 1

    def end(self) -> None:
        """Have the threads end, each with what it has in hand."""
        for items, _ in self._open.values():
            items.put(None)
        _end(self._layers, self._threads)


#: What a thread takes items from; ``None``: there are no more.
_Items = queue.SimpleQueue[Item | None]


def _start(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name="luwu-pipeline", daemon=True)
    thread.start()
    return thread


def _end(items: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    for _ in threads:
        items.put(None)
    for thread in threads:
        thread.join()


def _run_step(
    items: _Items,
    step: Callable[[Item], None],
    onward: Callable[[Item], None] | None,
    failed: Callable[[BaseException], None],
) -> None:
    torch.set_num_threads(1)
    try:
        while (item := items.get()) is not None:
            step(item)
            if onward is not None:
                onward(item)
    except Exception as error:
        failed(error)


def _run_layers(layers: queue.SimpleQueue[tuple[_Items, int] | None], steps: Steps) -> None:
    torch.set_num_threads(1)
    try:
        while (layer := layers.get()) is not None:
            items, count = layer
            for _ in range(count):
                if (item := items.get()) is None:
                    return
                for step in (steps.read, steps.adam, steps.cast, steps.write):
                    step(item)
    except Exception as error:
        steps.failed(error)

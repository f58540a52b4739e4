"""AdamW on the CPU by groups, in backward order, between a read and a write of each.

``overlapped``: while backward goes on, a group at a time: step, write; the state of the next one is
read meanwhile. ``delayed``: also, a group is written while the next one is stepped, and the last
groups during the next step's forward, so that a step counts some time after it ends.
``after``: gradients are put aside on SSD, and when backward has ended the groups go the way of
``overlapped``, their gradients read ahead too.

A step of a group ends with an acknowledgement, the return of ``Adam.step``: nothing of the group is
written, and its gradient's memory is not given to another, before that.
"""

import queue
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from baselines.fuyou.layout import FLOAT, Group, cast
from baselines.fuyou.memory import Dram
from baselines.fuyou.store import Store
from baselines.optimizers import AdamW
from baselines.part import step_adamw
from baselines.settings import Update


class Ring:
    """A ring of buffers, each for one group: read ahead of its step, written behind it.

    Groups come in an order that is known. Who may touch a buffer, and until when::

        free     nobody
        reading  the reader's thread, since the step began or the buffer became free
        taken    the optimizer's thread, since ``take``: it steps the group
        writing  the writer's thread, since the step of the group was acknowledged; then it is free

    Reads are of the last step's state, in which a group is written once: each may be read from then
    on, as soon as there is room, even in forward.
    """

    def __init__(self, store: Store, dram: Dram, groups: Sequence[Group]) -> None:
        """Start with one buffer, the least: a group is read when the one before is written."""
        self._store = store
        self._dram = dram
        self._groups = groups
        self._nbytes = max((group.nbytes for group in groups), default=0)
        self._buffers = [dram.take(self._nbytes, "optimizer state of a group")]
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._free.put(self._buffers[0])
        self._coming: deque[tuple[Group, Future[torch.Tensor]]] = deque()
        #: One thread: what is needed first is read first.
        self._reader = ThreadPoolExecutor(1, "fuyou-ahead")

    def deepen(self, most: int, spare: int) -> int:
        """Take buffers, up to ``most`` in all, while ``spare`` bytes stay free; return how many.

        Called between steps; the last may still be in writing.
        """
        while len(self._buffers) < min(most, len(self._groups)):
            taken = self._dram.try_take(self._nbytes, spare)
            if taken is None:
                break
            self._buffers.append(taken)
            self._free.put(taken)
        return len(self._buffers)

    def idle(self) -> torch.Tensor:
        """A buffer that nothing uses between steps."""
        return self._buffers[0]

    def begin(self) -> None:
        """Begin to read all groups, as far as there are buffers."""
        assert not self._coming, "a step has ended"
        for group in self._groups:
            self._coming.append((group, self._reader.submit(self._read, group)))

    def take(self, group: Group) -> torch.Tensor:
        """A buffer with the state of a group, the next one; waits until it has been read."""
        coming, read = self._coming.popleft()
        assert coming is group, "groups come in backward order"
        return read.result()

    def give_back(self, buffer: torch.Tensor) -> None:
        """Free a buffer that was taken, whether its group was written or not."""
        self._free.put(buffer)

    def close(self) -> None:
        """End the thread when what it has in hand has ended."""
        self._free.put(None)  # it may wait for a buffer that a failed step still has
        self._reader.shutdown(cancel_futures=True)

    def _read(self, group: Group) -> torch.Tensor:
        buffer = self._free.get()
        if buffer is None:
            raise RuntimeError("the run has ended")
        self._store.read(group, buffer)
        return buffer


#: Gradients of groups in host memory at once: backward waits where the optimizer is behind.
_GRADIENTS = 2
#: Buffers of optimizer state: one is read into, one stepped and written, or one each of these.
BUFFERS: dict[Update, int] = {"after": 2, "overlapped": 2, "delayed": 3}


class Adam:
    """PyTorch's fused AdamW on buffers of groups: parameter by parameter, as in memory."""

    def __init__(self, chosen: AdamW, learning_rate: float) -> None:
        self._chosen = chosen
        self._learning_rate = learning_rate
        self.seconds = 0.0

    def step(self, group: Group, buffer: torch.Tensor, gradient: torch.Tensor, done: int) -> None:
        """Step a group in its buffer, after ``done`` steps."""
        begin = time.perf_counter()
        grads, states = group.views(gradient, torch.float32), group.states(buffer)
        step_adamw(self._chosen, self._learning_rate, done, grads, states, fused=True)
        cast(group, buffer)
        self.seconds += time.perf_counter() - begin


class Updates:
    """The groups' updates of a step, on threads; and the threads' memory."""

    def __init__(
        self,
        form: Update,
        store: Store,
        adam: Adam,
        groups: Sequence[Group],
        dram: Dram,
        renewed: Callable[[Group, torch.Tensor], None],
        *,
        sums: bool,
    ) -> None:
        """``renewed`` is called with a group and its buffer when it has been stepped; ``sums``:
        a step has several micro-batches.
        """
        self._form = form
        self._store = store
        self._adam = adam
        self._renewed = renewed
        self.ring = Ring(store, dram, groups)
        gradient = max((group.gradient_bytes for group in groups), default=0)
        self._sum = dram.take(gradient, "a gradient of earlier micro-batches") if sums else None
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_GRADIENTS):
            self._free.put(dram.take(gradient, "a group's gradient"))
        self._optimizer = ThreadPoolExecutor(1, "fuyou-optimizer")
        self._writer = ThreadPoolExecutor(1, "fuyou-writer")
        self._under_way: list[Future[None]] = []
        #: The optimizer's thread alone has these two while there is anything for it to do.
        self._writing: list[Future[None]] = []
        self._put_aside: list[Group] = []
        #: The last step's record.
        self._recorded: Future[None] | None = None
        self._broken: BaseException | None = None

    def begin(self) -> None:
        """Begin a step: what it will need first is read."""
        if self._form != "after":
            self.ring.begin()

    def memory(self) -> torch.Tensor:
        """Memory for a group's gradient (float32 bytes); waits until there is some."""
        return self._free.get()

    def submit(
        self, group: Group, gradient: torch.Tensor, landed: Sequence[Any], *, last: bool
    ) -> None:
        """Hand over a gradient; ``last``: of the step's last micro-batch."""
        self._submit(gradient, lambda: self._take(group, gradient, landed, last))

    def finish(self) -> None:
        """Wait until all groups are stepped, and written unless that is delayed.

        Raises what went wrong on the way.
        """
        self._settle()  # all gradients are put aside then
        aside, self._put_aside = self._put_aside, []
        if aside:
            self.ring.begin()
        for group in aside:
            self._take_aside(group)
        self._settle()
        if self._form != "delayed":
            self._written()

    def commit(self) -> None:
        """Commit the step once all of it is written. Raises the error of the last step's writes."""
        step = self._store.steps_ended + 1
        if self._form != "delayed":
            self._store.commit(step)
            return
        self.flush()
        self._store.end()
        writing, self._writing = self._writing, []
        self._recorded = self._writer.submit(self._record, writing, step)

    def flush(self) -> None:
        """Wait until the last step counts. Raises what went wrong."""
        if self._recorded is not None:
            self._recorded.result()

    def close(self) -> None:
        """End the threads when what they have in hand has ended."""
        self._optimizer.shutdown()
        self._writer.shutdown()
        self.ring.close()

    def _submit(self, gradient: torch.Tensor, task: Callable[[], None]) -> None:
        self._under_way.append(self._optimizer.submit(self._guarded, gradient, task))

    def _settle(self) -> None:
        """Wait for the optimizer's thread. Raises what went wrong."""
        under_way, self._under_way = self._under_way, []
        wait(under_way)
        if self._broken is not None:
            raise self._broken

    def _guarded(self, gradient: torch.Tensor, task: Callable[[], None]) -> None:
        """Do the task unless an earlier one failed; the gradient's memory is free in any case."""
        try:
            if self._broken is None:
                task()
        except BaseException as error:
            self._broken = self._broken or error
        finally:
            self._free.put(gradient)

    def _take(
        self, group: Group, gradient: torch.Tensor, landed: Sequence[Any], last: bool
    ) -> None:
        for event in landed:
            event.synchronize()
        if self._sum is not None:
            earlier = self._store.take_aside(group, self._sum[: group.gradient_bytes])
            if earlier is not None:
                earlier.result()
                count = group.numel * FLOAT
                gradient[:count].view(torch.float32).add_(self._sum[:count].view(torch.float32))
        if last and self._form != "after":
            self._update(group, gradient)
        else:
            self._store.put_aside(group, gradient[: group.gradient_bytes])
            if last:
                self._put_aside.append(group)

    def _take_aside(self, group: Group) -> None:
        gradient = self.memory()
        read = self._store.take_aside(group, gradient[: group.gradient_bytes])
        assert read is not None

        def taken() -> None:
            read.result()
            self._update(group, gradient)

        self._submit(gradient, taken)

    def _update(self, group: Group, gradient: torch.Tensor) -> None:
        buffer = self.ring.take(group)
        if self._form != "delayed":
            self._written()
        self._adam.step(group, buffer, gradient, self._store.steps_ended)  # returns: acknowledged
        self._renewed(group, buffer)
        self._writing.append(self._writer.submit(self._write, group, buffer))

    def _write(self, group: Group, buffer: torch.Tensor) -> None:
        try:
            self._store.write(group, buffer)
        finally:
            self.ring.give_back(buffer)

    def _record(self, writing: Sequence[Future[None]], step: int) -> None:
        try:
            for write in writing:
                write.result()
            self._store.commit(step)
        except BaseException as error:  # nobody may ask for it
            warnings.warn(f"the last step does not count: {error}", stacklevel=2)
            raise

    def _written(self) -> None:
        """Wait for the writes so far. Raises what went wrong in one."""
        writing, self._writing = self._writing, []
        wait(writing)
        for write in writing:
            write.result()

"""AdamW on the CPU by groups, in backward order, between a read and a write of each.

``overlapped``: while backward goes on, a group at a time: read, step, write. ``delayed``: the
write of a group while the next one is stepped. ``after``: gradients are put aside on SSD, and the
groups are read, stepped and written when backward has ended.

A step of a group ends with an acknowledgement, the result of its future: nothing of the group is
written, and its gradient's memory is not given to another, before that is there.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.nn as nn

from baselines import optimizers
from baselines.fuyou.layout import FLOAT, Group
from baselines.fuyou.memory import Dram
from baselines.fuyou.store import Store
from baselines.settings import Update

#: Gradients of groups in host memory at once: backward waits where the optimizer is behind.
_GRADIENTS = 2


class Adam:
    """PyTorch's fused AdamW over memory that it is given: as in memory, parameter by parameter."""

    def __init__(
        self, groups: Sequence[Group], chosen: optimizers.AdamW, learning_rate: float
    ) -> None:
        self._optimizers = {
            group.index: optimizers.make(
                chosen,
                [nn.Parameter(torch.empty(0)) for _ in group.params],
                learning_rate,
                fused=True,
            )
            for group in groups
        }
        self.seconds = 0.0

    def step(self, group: Group, buffer: torch.Tensor, gradient: torch.Tensor, done: int) -> None:
        """Step a group in its buffer, of which ``done`` steps are done."""
        begin = time.perf_counter()
        optimizer = self._optimizers[group.index]
        (options,) = optimizer.param_groups
        options["steps_done"] = done
        moments = group.part(buffer, "moments")
        views = zip(
            options["params"],
            group.views(group.part(buffer, "master"), torch.float32),
            group.views(gradient, torch.float32),
            group.views(moments, torch.float32),
            group.views(moments, torch.float32, group.numel),
            strict=True,
        )
        for param, master, grad, first, second in views:
            param.data, param.grad = master, grad
            step = torch.tensor(float(done))
            optimizer.state[param] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        optimizer.step()
        for param in options["params"]:
            param.data, param.grad = torch.empty(0), None
        optimizer.state.clear()
        cast(group, buffer)
        self.seconds += time.perf_counter() - begin


def cast(group: Group, buffer: torch.Tensor) -> None:
    """Make what is computed with of the masters, if it is not the masters."""
    if group.computed.name == "compute":
        masters = group.part(buffer, "master").view(torch.float32)[: group.numel]
        computed = group.part(buffer, "compute")
        computed.view(torch.bfloat16)[: group.numel].copy_(masters)


class Updates:
    """The groups' updates of a step, on a thread; and the threads' memory."""

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
        largest = max((group.nbytes for group in groups), default=0)
        gradient = max((group.gradient_bytes for group in groups), default=0)
        self._buffers = [
            dram.take(largest, "optimizer state of a group")
            for _ in range(2 if form == "delayed" else 1)
        ]
        self._sum = dram.take(gradient, "a gradient of earlier micro-batches") if sums else None
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_GRADIENTS):
            self._free.put(dram.take(gradient, "a group's gradient"))
        self._coordinator = ThreadPoolExecutor(1, "fuyou-optimizer")
        self._stepper = ThreadPoolExecutor(1, "fuyou-adam")
        self._under_way: list[Future[None]] = []
        self._broken: BaseException | None = None
        #: Stepped, not written yet: its buffer is the first.
        self._unwritten: Group | None = None
        self._put_aside: list[Group] = []

    def memory(self) -> torch.Tensor:
        """Memory for a group's gradient (float32 bytes); waits until there is some."""
        return self._free.get()

    def idle(self) -> torch.Tensor:
        """Memory for a trained group's state, which nothing uses between steps."""
        return self._buffers[0]

    def submit(
        self, group: Group, gradient: torch.Tensor, landed: Sequence[Any], *, last: bool
    ) -> None:
        """Hand over a gradient; ``last``: of the step's last micro-batch."""
        task = self._coordinator.submit(self._take, group, gradient, landed, last)
        self._under_way.append(task)

    def finish(self) -> None:
        """Wait until all groups are stepped and written. Raises what went wrong on the way."""
        self._settle()  # all that is to be put aside is then
        while self._put_aside:
            task = self._coordinator.submit(self._take_aside, self._put_aside.pop(0))
            self._under_way.append(task)
        self._under_way.append(self._coordinator.submit(self._flush))
        self._settle()

    def close(self) -> None:
        """End the threads when what they have in hand has ended."""
        self._coordinator.shutdown()
        self._stepper.shutdown()

    def _settle(self) -> None:
        under_way, self._under_way = self._under_way, []
        wait(under_way)
        for task in under_way:
            task.result()

    def _take(
        self, group: Group, gradient: torch.Tensor, landed: Sequence[Any], last: bool
    ) -> None:
        def taken() -> None:
            for event in landed:
                event.synchronize()
            if self._sum is not None and self._store.take_aside(
                group, self._sum[: group.gradient_bytes]
            ):
                count = group.numel * FLOAT
                gradient[:count].view(torch.float32).add_(self._sum[:count].view(torch.float32))
            if last and self._form != "after":
                self._update(group, gradient)
            else:
                self._store.put_aside(group, gradient[: group.gradient_bytes])
                if last:
                    self._put_aside.append(group)

        self._guarded(gradient, taken)

    def _take_aside(self, group: Group) -> None:
        gradient = self.memory()

        def taken() -> None:
            self._store.take_aside(group, gradient[: group.gradient_bytes])
            self._update(group, gradient)

        self._guarded(gradient, taken)

    def _guarded(self, gradient: torch.Tensor, task: Callable[[], None]) -> None:
        """Do the task unless an earlier one failed; the gradient's memory is free in any case."""
        try:
            if self._broken is not None:
                raise RuntimeError("an earlier group was not updated") from self._broken
            task()
        except BaseException as error:
            self._broken = self._broken or error
            raise
        finally:
            self._free.put(gradient)

    def _update(self, group: Group, gradient: torch.Tensor) -> None:
        before = self._unwritten
        # A group that is not written yet has the first buffer.
        buffer = self._buffers[-1]
        for read in self._store.read(group, ("master", "moments"), buffer):
            read.result()
        stepped = self._stepper.submit(self._adam.step, group, buffer, gradient, self._store.step)
        try:
            if before is not None:
                self._store.write(before, self._buffers[0])
        finally:
            stepped.result()  # the acknowledgement
        self._renewed(group, buffer)
        if self._form == "delayed":
            self._buffers.reverse()
            self._unwritten = group
        else:
            self._store.write(group, buffer)

    def _flush(self) -> None:
        if self._unwritten is not None and self._broken is None:
            self._store.write(self._unwritten, self._buffers[0])
        self._unwritten = None

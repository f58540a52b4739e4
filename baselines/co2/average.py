"""A mean over workers that is under way while they train on."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Average:
    """A buffer of its own, never what is trained, and the all-reduce of it.

    Only this class touches the buffer while the all-reduce runs: the caller fills it before
    ``start`` and reads it after ``wait``. On CUDA the all-reduce waits for what the current stream
    has queued, and whoever waits orders the current stream after it; on the host gloo's threads
    move it.
    """

    def __init__(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.buffer = buffer
        self._group = group
        self._work: dist.Work | None = None
        #: Whether the buffer has a round's sum in it, or will have.
        self.started = False

    def start(self) -> None:
        """Start to add up all workers' buffers."""
        assert self._work is None, "the last all-reduce has not been waited for"
        self._work = dist.all_reduce(self.buffer, group=self._group, async_op=True)
        self.started = True

    def settle(self) -> None:
        """Wait for the sum, if one is under way."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()

    def wait(self) -> None:
        """Have the mean in the buffer, which may then be overwritten."""
        self.settle()
        self.started = False
        self.buffer.div_(self._group.size())

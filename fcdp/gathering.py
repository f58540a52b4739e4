"""Gathers under way: what FSDP2 waits for, on the CPU and on an accelerator's streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fcdp.exchange import Pending, wait_all
from fcdp.failure import Failures
from fcdp.streams import Streams

#: The exchanges that have to end before a gather goes on to its next part.
Parts = Iterator[Sequence[Pending]]


def run(parts: Parts) -> None:
    """Queue all parts of a gather, whose exchanges an accelerator orders by itself."""
    for works in parts:
        assert not works, "what is queued has nothing to wait for"


class Gathering(dist.Work):
    """A gather under way on the CPU, and what follows its first exchange."""

    def __init__(self, parts: Parts, failures: Failures, forget: Callable[[], None]) -> None:
        """``forget`` has FSDP2 gather anew what this gather did not bring."""
        super().__init__()
        self._parts = parts
        self._failures = failures
        self._forget = forget
        self._works: Sequence[Pending] | None = next(parts)
        #: Exchanges that somebody interrupted: their memory must outlive them.
        self._abandoned: Sequence[Pending] = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the whole gather has ended, or was given up by an error in an earlier wait.

        FSDP2 waits again for what an error has interrupted, and a message that has arrived never
        arrives again.
        """
        while self._works is not None:
            works, self._works = self._works, None
            self._abandoned = works
            try:
                with self._failures.waiting():
                    wait_all(works)
                self._works = next(self._parts, None)
            except BaseException:
                self._forget()
                raise
        self._abandoned = []
        return True


class Queued(dist.Work):
    """A gather queued on a stream of its own."""

    def __init__(self, streams: Streams, done: Any) -> None:
        super().__init__()
        self._streams = streams
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the current stream after the whole gather."""
        self._streams.current().wait_event(self._done)
        return True

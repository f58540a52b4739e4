"""The streams that one engine queues its transfers on."""

from contextlib import AbstractContextManager
from typing import Any

import torch


class Streams:
    """Four streams of an accelerator, so that each kind of transfer has a queue of its own.

    :class:`fcdp.cache.entry.Access` orders accesses to each piece of memory. On the CPU these are
    ``torch.cpu``'s streams, which order nothing.

    - ``inter_node``: all-gathers across nodes. They run ahead of the gathers inside the node, which
      FSDP2 queues on its own all-gather stream, and wait only for FSDP2's copy-in of their shard.
    - ``intra_node``: gathers inside the node for ``unshard(async_op=True)``, which FSDP2 calls on
      the computing stream.
    - ``copies_out``: from slices to tiers.
    - ``copies_in``: from tiers to slices, ahead of their gathers.
    """

    def __init__(self, device: torch.device) -> None:
        #: Nothing is queued: tensors are on the CPU, and copies have ended when they return.
        self.on_host = device.type == "cpu"
        self._backend: Any = torch.get_device_module(device)
        # Before computation: a transfer that waits behind a kernel delays all that follow it.
        self.inter_node = self._backend.Stream(priority=-1)
        self.intra_node = self._backend.Stream(priority=-1)
        self.copies_out = self._backend.Stream()
        self.copies_in = self._backend.Stream()

    def current(self) -> Any:
        """Return the stream that operations are queued on now."""
        return self._backend.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the body's operations on ``stream``."""
        context: AbstractContextManager[Any] = self._backend.stream(stream)
        return context

"""Ending exchanges under way, from another thread than the one that waits for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# No exchange uses tags so large. Consecutive ones go by the interfaces in turn.
_UNUSED_TAG = 1 << 20


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """What carries the group's exchanges: those of CUDA tensors perhaps another than the CPU's."""
    backends = (group._get_backend(device) for device in group._device_types)
    return list({id(backend): backend for backend in backends}.values())


def is_gloo(backend: Any) -> bool:
    """Whether the host waits for this backend's exchanges."""
    return bool(backend.name() == "gloo")


def break_all(backends: Sequence[Any]) -> None:
    """End whatever waits for these backends, with an error: they cannot be used afterwards."""
    for backend in filter(is_gloo, backends):
        _break_gloo(backend)
    others = [backend for backend in backends if not is_gloo(backend)]
    # NCCL aborts all of its communicators at once: one could wait for another.
    whole = [backend for backend in others[:1] if hasattr(backend, "_group_start")]
    for backend in whole:
        backend._group_start()
    for backend in others:
        with contextlib.suppress(Exception):
            backend.abort()
    for backend in whole:
        backend._group_end()


def _break_gloo(backend: Any) -> None:
    """Close all connections of a gloo backend, which knows no abort.

    A receive that times out does so, under whoever waits for the others.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + interfaces):
        for peer in range(backend.size()):
            # One whose connection is closed already fails at once, and closes no others.
            with contextlib.suppress(RuntimeError):
                if peer != backend.rank():
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    backend.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))

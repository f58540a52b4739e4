"""Groups and backends that record calls and carry nothing, for one process that plays all ranks."""

from __future__ import annotations

from typing import Any

import torch

from fcdp import failure
from fcdp.failure import Failures

#: Far below the groups' time-out, far above what the machine needs under load.
SOON_S = 100.0


class Backend:
    """A backend that records calls, and carries nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[str] = []

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.calls.append("abort")

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


class Group:
    """A group of as many ranks as asked for."""

    def __init__(self, backend: Backend, size: int = 2) -> None:
        self._backend = backend
        self._size = size
        self._device_types = [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Backend:
        return self._backend

    def size(self) -> int:
        return self._size


def over_nccl(name: str = "a", size: int = 2) -> tuple[Failures, Backend]:
    """Failures of this rank over a group of NCCL, and the group's backend."""
    backend = Backend("nccl")
    group: Any = Group(backend, size)
    return Failures(name, [group]), backend


def look_often(failures: Failures) -> None:
    """Look until the store must have been asked."""
    for _ in range(2 * failure.IDLE_POLLS):
        failures.look()


def exchange(failures: Failures, times: int) -> None:
    """Wait for as many exchanges, each of which has arrived."""
    for _ in range(times):
        with failures.waiting():
            pass

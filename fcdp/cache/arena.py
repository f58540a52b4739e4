"""One block of host memory for all entries, page-locked and near its GPU."""

from __future__ import annotations

import ctypes
import logging
import platform
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("fcdp")

#: Entries start on this boundary: every dtype can view them, and direct I/O takes them.
ALIGNMENT = 4096

#: Linux system call numbers of mbind(2), which the C library does not wrap.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
#: NaN in float16, bfloat16 and float32 alike.
POISON = 0xFF


class Arena:
    """Registered with CUDA once, for the whole run.

    ``pin_memory()`` would round the block up to a power of two and never give it back.
    """

    def __init__(self, nbytes: int, device: torch.device, *, poison: bool = False) -> None:
        block = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        start = -block.data_ptr() % ALIGNMENT
        self.memory = block[start : start + nbytes]
        self._taken = 0
        _prefer_node_of(device, self.memory)
        self._registered = device.type == "cuda" and nbytes > 0
        if self._registered:
            error = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0)
            if int(error) != 0:
                self._registered = False
                raise RuntimeError(
                    f"CUDA could not page-lock {nbytes} bytes of host memory ({error}); "
                    "raise the limit (ulimit -l, docker --ulimit memlock=-1)"
                )
        if poison:
            self.memory.fill_(POISON)

    def take(self, nbytes: int) -> torch.Tensor:
        """The next ``nbytes`` (uint8), aligned. The arena was sized to hold all that is taken."""
        assert self._taken + nbytes <= self.memory.numel(), "the arena was planned too small"
        part = self.memory[self._taken : self._taken + nbytes]
        self._taken += aligned(nbytes)
        return part

    def __del__(self) -> None:
        if getattr(self, "_registered", False):
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


def aligned(nbytes: int) -> int:
    """What ``nbytes`` take in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _prefer_node_of(device: torch.device, memory: torch.Tensor) -> None:
    """Have the untouched ``memory`` come from the NUMA node that ``device`` hangs on, if known.

    A preference only: where it cannot be had, copies cross the sockets' link and nothing breaks.
    """
    number = _MBIND.get(platform.machine())
    node = _numa_node(device)
    if number is None or node is None or memory.numel() == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1 << node)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(aligned(memory.numel()) - ALIGNMENT),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(8 * ctypes.sizeof(mask)),
        ctypes.c_uint(0),
    )
    if failed:
        logger.info("host cache: not bound to NUMA node %d (errno %d)", node, ctypes.get_errno())


def _numa_node(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if 0 <= node < 64 else None

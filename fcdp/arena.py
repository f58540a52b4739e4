"""One block of host memory for all entries, page-locked and near its GPU."""

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import weakref
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("fcdp")

#: Entries start on this boundary, the system's page (4 KiB on x86, up to 64 KiB on Arm): every
#: dtype can view them, direct I/O takes them, and none shares a page with what is not locked.
ALIGNMENT = mmap.PAGESIZE

#: Linux system call numbers of mbind(2), which the C library does not wrap.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
#: NaN in float16, bfloat16 and float32 alike.
POISON = 0xFF

#: Advice to the kernel on an arena, before its first page exists.
_ADVICE = (
    # DataLoader forks its workers. A fork makes private pages copy-on-write in the parent too: the
    # parent's next write would move a page elsewhere while the GPU goes on reading and writing the
    # one that it has locked. Newer kernels copy locked pages for the child at once instead: the
    # whole arena for each worker. Exempt, the pages stay where they are, and a child has none of
    # them; touching the arena there is a segmentation fault.
    "MADV_DONTFORK",
    # A lock and a copy handle 512 times fewer pages.
    "MADV_HUGEPAGE",
)


class Arena:
    """Memory of its own pages, registered with CUDA once, for the whole run.

    ``pin_memory()`` would round the block up to a power of two and never give it back. Tensors
    that view the memory keep it mapped; it is page-locked for as long as the arena lives.
    """

    def __init__(self, nbytes: int, device: torch.device, *, poison: bool = False) -> None:
        mapping = mmap.mmap(
            -1, max(aligned(nbytes), ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        _mappings.add(mapping)
        block = torch.frombuffer(mapping, dtype=torch.uint8)
        self.memory = block[:nbytes]
        self._taken = 0
        _prefer_node_of(device, block)
        _advise(mapping)
        if device.type == "cuda" and nbytes > 0:
            _register(block, device)
            # Holds the mapping: memory that is unmapped first could not be unregistered.
            weakref.finalize(self, _unregister, mapping, block.data_ptr(), os.getpid())
        if poison:
            self.memory.fill_(POISON)

    def take(self, nbytes: int) -> torch.Tensor:
        """Take the next ``nbytes`` (uint8), aligned. The arena was sized for all that is taken."""
        assert self._taken + nbytes <= self.memory.numel(), "the arena was planned too small"
        part = self.memory[self._taken : self._taken + nbytes]
        self._taken += aligned(nbytes)
        return part


def aligned(nbytes: int) -> int:
    """Bytes that ``nbytes`` take in an arena: whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


#: All that is mapped, and in a forked child what it inherited by name only: unmapping it there
#: would take away whatever the child has put in its place.
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_mappings))


def _advise(mapping: mmap.mmap) -> None:
    for name in _ADVICE:
        advice = getattr(mmap, name, None)
        if advice is None:
            logger.info("host memory: this system knows no %s", name)
            continue
        try:
            mapping.madvise(advice)
        except OSError as error:
            logger.info("host memory: %s refused (%s)", name, error.strerror)


def _register(block: torch.Tensor, device: torch.device) -> None:
    """Page-lock whole pages. Raises ``RuntimeError`` if the system's limit forbids it."""
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(block.data_ptr(), block.numel(), 0)
    if int(error) == 0:
        return
    # The runtime remembers its last error, and the next kernel's check would raise it as its own.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
    raise RuntimeError(
        f"CUDA could not page-lock {block.numel()} bytes of host memory ({error}); "
        "raise the limit (ulimit -l, docker --ulimit memlock=-1)"
    )


def _unregister(mapping: mmap.mmap, address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has neither the memory nor CUDA
        torch.cuda.cudart().cudaHostUnregister(address)


def _prefer_node_of(device: torch.device, memory: torch.Tensor) -> None:
    """Place the untouched ``memory`` on the device's NUMA node, where that is known.

    A preference only: where it cannot be had, copies cross the sockets' link and nothing breaks.
    """
    number = _MBIND.get(platform.machine())
    if number is None or device.type != "cuda":
        return
    at: Any = torch.cuda.get_device_properties(device)
    address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return
    if not 0 <= node < 64:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1 << node)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(memory.numel()),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(8 * ctypes.sizeof(mask)),
        ctypes.c_uint(0),
    )
    if failed:
        logger.info("host cache: not bound to NUMA node %d (errno %d)", node, ctypes.get_errno())

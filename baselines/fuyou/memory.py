"""Host memory within a budget, and a process's memory by the kernel's count."""

import ctypes
import re
from pathlib import Path
from typing import Literal

import torch

from fcdp.arena import Arena, aligned
from fcdp.sizes import written

#: Options of mallopt(3), and what counts as large.
_MMAP_THRESHOLD, _LARGE = -3, 64 * 1024
_STATUS = Path("/proc/self/status")


class Dram:
    """One block of host memory, page-locked on CUDA, of which pieces are taken and given back.

    The strategy has no host memory outside of it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._memory = Arena(nbytes, device).memory.zero_()
        #: Free ranges: where each begins, and its bytes, in order.
        self._free = [(0, nbytes)]
        self._used = 0
        self.peak = 0

    @property
    def free(self) -> int:
        return self.nbytes - self._used

    def take(self, nbytes: int, what: str) -> torch.Tensor:
        """Aligned bytes (uint8). Raises ``ValueError`` where the budget has no room for them."""
        piece = self.try_take(nbytes)
        if piece is None:
            raise ValueError(
                f"dram = {written(self.nbytes)}: {what} takes {written(nbytes)}, and "
                f"{written(self.free)} are left; allowed is at least "
                f"{written(self._used + aligned(nbytes))}"
            )
        return piece

    def try_take(self, nbytes: int, spare: int = 0) -> torch.Tensor | None:
        """The same; ``None`` where there is no room, or less than ``spare`` would be left."""
        size = aligned(nbytes)
        if self.free - size < spare:
            return None
        for place, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[place : place + 1] = [(start + size, room - size)] * (room > size)
                self._used += size
                self.peak = max(self.peak, self._used)
                return self._memory[start : start + nbytes]
        return None

    def give_back(self, piece: torch.Tensor) -> None:
        start = piece.data_ptr() - self._memory.data_ptr()
        size = aligned(piece.numel())
        self._used -= size
        joined: list[tuple[int, int]] = []
        for begin, room in sorted([*self._free, (start, size)]):
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self._free = joined


def taken(what: Literal["VmRSS", "VmHWM"]) -> int:
    """Bytes of this process that are resident, or were at most since ``forget_peak``."""
    match = re.search(rf"^{what}:\s*(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None, "Linux says it"
    return int(match[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def give_back_at_once() -> None:
    """Return freed memory to the kernel, and from now on large pieces at once.

    The free memory that it would hold back grows with the model's depth.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    libc.malloc_trim(0)

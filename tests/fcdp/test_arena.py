"""The block of host memory: how it is taken and handed out, and how long it is page-locked."""

import contextlib
import ctypes
import errno
import gc
import logging
import mmap
import os
import platform
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.arena import ALIGNMENT, POISON, Arena
from fcdp.cache.tiers import DiskTier, HostTier
from fcdp.counts import Ledger
from fcdp.partial_gradients import Partials
from tests.fcdp.stand_ins import CPU, STREAMS, StandInUnit

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p

CUDA = torch.device("cuda", 0)
#: Large enough that the kernel gives it a mapping of its own.
LARGE = 16 * 2**20
UNIT: Any = StandInUnit("unit", 8)


def test_parts_are_aligned_and_do_not_overlap() -> None:
    arena = Arena(ALIGNMENT + 100, CPU)
    first, second = arena.take(1), arena.take(100)
    assert arena.memory.data_ptr() % ALIGNMENT == 0
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    with pytest.raises(AssertionError, match="planned too small"):
        arena.take(1)


@pytest.fixture
def made() -> Iterator[list[weakref.ref[Arena]]]:
    """All arenas that are made; one that has gone is page-locked no more."""
    arenas: list[weakref.ref[Arena]] = []
    make = Arena.__init__

    def note(self: Arena, *args: Any, **kwargs: Any) -> None:
        arenas.append(weakref.ref(self))
        make(self, *args, **kwargs)

    with mock.patch.object(Arena, "__init__", note):
        yield arenas


def partials() -> Partials:
    made = Partials({UNIT: 16}, STREAMS, Ledger())
    made.of(UNIT)
    made.allocate()
    return made


def holders(directory: Any) -> dict[str, Any]:
    return {
        "host": lambda: HostTier([UNIT], STREAMS, poison=False),
        "disk": lambda: DiskTier([UNIT], STREAMS, directory=directory, buffers=2),
        "partial gradients": partials,
    }


@pytest.mark.parametrize("name", ["host", "disk", "partial gradients"])
def test_an_arena_lives_as_long_as_what_uses_its_memory(
    name: str, made: list[weakref.ref[Arena]], tmp_path: Any
) -> None:
    holder = holders(tmp_path)[name]()
    gc.collect()
    assert [arena() is not None for arena in made] == [True]
    del holder
    gc.collect()
    assert made[0]() is None


def mapping_at(address: int) -> dict[str, str]:
    """Return what the kernel says of the mapping that holds ``address``; empty where none does."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        header, *lines = block.splitlines()
        first, end = (int(bound, 16) for bound in header.split()[0].split("-"))
        if first <= address < end:
            return dict(line.split(":", 1) for line in lines)
    return {}


def resident_pages(address: int, nbytes: int) -> int | None:
    """Count the pages that exist; ``None`` where not all of this is mapped."""
    flags = (ctypes.c_ubyte * (nbytes // ALIGNMENT))()
    failed = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags)
    return None if failed else sum(flag & 1 for flag in flags)


def test_pages_are_exempt_from_fork_and_may_be_huge() -> None:
    arena = Arena(LARGE, CPU)
    flags = mapping_at(arena.memory.data_ptr())["VmFlags"]
    assert {"dc", "hg"} <= set(flags.split())  # don't copy, huge pages


def test_the_arena_is_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        arena = Arena(100, CPU, poison=True)
    assert arena.memory.device == CPU
    assert arena.take(100).tolist() == [POISON] * 100


def test_an_arena_may_be_empty() -> None:
    assert Arena(0, CPU).take(0).numel() == 0


def test_what_views_the_memory_keeps_it_mapped() -> None:
    arena = Arena(LARGE, CPU)
    part = arena.take(10)
    address = part.data_ptr()
    del arena
    assert part.fill_(7).tolist() == [7] * 10
    del part
    assert mapping_at(address) == {}


class Host:
    """Records what is asked of kernel and CUDA for an arena, and what was there by then."""

    def __init__(self, *, register: int = 0, advice: int = 0) -> None:
        """``register``, ``advice``: the error that each answers with."""
        self.calls: list[tuple[str, int, int]] = []
        self.resident: list[int | None] = []
        self._register, self._advice = register, advice

    def note(self, name: str, address: int, nbytes: int) -> None:
        self.calls.append((name, address, nbytes))
        self.resident.append(resident_pages(address, nbytes or ALIGNMENT))

    def syscall(self, number: Any, address: Any, nbytes: Any, *rest: Any) -> int:
        assert rest[0].value == 1, "preferred, not bound"
        self.note("mbind", address.value, nbytes.value)
        return 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.note("register", address, nbytes)
        return self._register

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.note("unregister", address, 0)

    def advise(self, mapping: mmap.mmap, advice: int) -> None:
        names = {mmap.MADV_DONTFORK: "don't fork", mmap.MADV_HUGEPAGE: "huge pages"}
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.note(names[advice], address, len(mapping))
        if self._advice:
            raise OSError(self._advice, os.strerror(self._advice))


@contextlib.contextmanager
def host(**errors: int) -> Iterator[Host]:
    """A machine with one GPU, on the second NUMA node."""
    recorder = Host(**errors)

    class Mapping(mmap.mmap):
        def madvise(self, advice: int, *rest: int) -> None:
            recorder.advise(self, advice)

    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    with (
        mock.patch.object(mmap, "mmap", Mapping),
        mock.patch("fcdp.arena.ctypes.CDLL", return_value=recorder),
        mock.patch("fcdp.arena.Path", return_value=mock.Mock(read_text=lambda **_: "1")),
        mock.patch.object(platform, "machine", return_value="x86_64"),
        mock.patch.object(torch.cuda, "cudart", return_value=recorder),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=place),
    ):
        yield recorder


def test_memory_is_placed_and_advised_before_its_first_page_and_locked_in_whole_pages() -> None:
    with host() as recorder:
        arena = Arena(LARGE + 1, CUDA, poison=True)
        address = arena.memory.data_ptr()
        whole = (address, LARGE + ALIGNMENT)
        assert recorder.calls == [
            ("mbind", *whole),
            ("don't fork", *whole),
            ("huge pages", *whole),
            ("register", *whole),
        ]
        assert recorder.resident == [0] * 4
        assert arena.memory.eq(POISON).all()
        del arena
        # Given back while it is still mapped.
        assert recorder.calls[4:] == [("unregister", address, 0)]
        assert recorder.resident[4] == 1
        assert mapping_at(address) == {}


def test_advice_that_is_refused_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with host(advice=errno.EINVAL), caplog.at_level(logging.INFO, "fcdp"):
        Arena(100, CPU).take(100).fill_(1)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split()[2] for message in messages] == ["MADV_DONTFORK", "MADV_HUGEPAGE"]


def test_memory_that_cannot_be_locked_is_an_error_that_no_later_kernel_raises() -> None:
    """CUDA's last error stays until somebody asks for it."""
    asked = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    whole = 2 * ALIGNMENT
    with host(register=2) as recorder, mock.patch.object(torch, "zeros", asked):
        with pytest.raises(RuntimeError, match=f"could not page-lock {whole} bytes"):
            Arena(ALIGNMENT + 1, CUDA)
        gc.collect()
    asked.assert_called_once_with(1, device=CUDA)
    assert recorder.calls[-1][0] == "register"  # and was not given back


def in_a_fork(child: Callable[[], bool]) -> bool:
    process = os.fork()
    if process == 0:
        answer = False
        try:
            answer = child()
        finally:
            os._exit(0 if answer else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.ranks
def test_an_arena_that_ends_in_a_forked_child_takes_nothing_from_it() -> None:
    """The child may have something else at the address by then, and must not call CUDA."""
    with host() as recorder:
        holder = [Arena(LARGE, CUDA)]
        address = holder[0].memory.data_ptr()

        def child() -> bool:
            fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
            mapped = _libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(LARGE), 3, fixed, -1, 0)
            holder.clear()
            gc.collect()
            called = [name for name, _, _ in recorder.calls]
            return mapped == address and mapping_at(address) != {} and "unregister" not in called

        assert in_a_fork(child)
        holder.clear()
        assert recorder.calls[-1][0] == "unregister"

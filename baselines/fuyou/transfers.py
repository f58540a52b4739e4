"""Transfers between SSD, host memory and the device, counted; and a limit to those of SSD.

Those of SSD run on threads of their own. On the CPU a copy to the device or from it has ended when
it returns; on CUDA copies run on streams of their own, which order them with reads and writes.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fcdp import direct_io
from fcdp.direct_io import File
from fcdp.streams import Streams

_GROUPS = Path("/sys/fs/cgroup")
Way = Literal["read", "write"]
WAYS: tuple[Way, ...] = ("read", "write")


class Limited:
    """This process in a control group of its own, until this object is gone.

    It limits what is moved from and to a disk, by direct I/O too, and each way apart, so that reads
    and writes go on side by side.
    """

    def __init__(self, folder: Path, bytes_per_s: int) -> None:
        """Limit the disk that ``folder`` lies on.

        Raises ``ValueError`` where that cannot be done.
        """
        number = os.stat(folder).st_dev
        disk = f"{os.major(number)}:{os.minor(number)}"
        first = (_GROUPS / "blkio").is_dir()
        parent = _GROUPS / "blkio" if first else _GROUPS
        group = parent / f"fuyou-{os.getpid()}"
        limits = {"io.max": f"{disk} rbps={bytes_per_s} wbps={bytes_per_s}"}
        if first:
            limits = {f"blkio.throttle.{way}_bps_device": f"{disk} {bytes_per_s}" for way in WAYS}
        for old in parent.glob("fuyou-*"):
            if not Path("/proc", old.name.removeprefix("fuyou-")).exists():
                with contextlib.suppress(OSError):
                    old.rmdir()  # of a process that was killed
        try:
            group.mkdir()
            self.leave = weakref.finalize(self, _leave, parent, group)
            for name, text in (*limits.items(), ("cgroup.procs", str(os.getpid()))):
                (group / name).write_text(text, encoding="ascii")
        except OSError as error:
            raise ValueError(
                f"ssd_limit = {bytes_per_s}: needs root, a control group for block devices and a "
                f"folder on one, which {folder} on {disk} is not ({error.strerror})"
            ) from error


def _leave(parent: Path, group: Path) -> None:
    with contextlib.suppress(OSError):
        (parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


#: Transfers at once, each way: a disk is busy with a few, and neither way waits for the other.
_THREADS = 4


class Disk:
    """Transfers between host memory and files, and how fast they are."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(_THREADS, "fuyou-read")
        self._writers = ThreadPoolExecutor(_THREADS, "fuyou-write")
        self._closed = False
        self._lock = threading.Lock()
        self._under_way: Counter[Way] = Counter()
        self._since: dict[Way, float] = {}
        #: Bytes so far, and seconds in which there was a transfer of the kind.
        self.nbytes: dict[Way, int] = defaultdict(int)
        self.seconds: dict[Way, float] = defaultdict(float)

    def write(
        self, file: File, offset: int, memory: torch.Tensor, landed: Sequence[Any] = ()
    ) -> Future[int]:
        """Write aligned memory; the result is its checksum."""
        move = partial(direct_io.write, file, offset, memory, landed=landed)
        try:
            return self._writers.submit(self._counted, "write", memory, move)
        except RuntimeError:
            if self._closed:
                raise
            # The program ends: Python waits for running threads and starts no others. This one
            # writes itself, lest a step that has ended be lost.
            done: Future[int] = Future()
            done.set_result(self._counted("write", memory, move))
            return done

    def read(self, file: File, offset: int, memory: torch.Tensor, expected: int) -> Future[int]:
        """Fill aligned memory with what was written with this checksum."""
        move = partial(direct_io.read, file, offset, memory, expected=expected)
        return self._readers.submit(self._counted, "read", memory, move)

    def moved(self, way: Way) -> tuple[int, float]:
        """Bytes so far, and seconds in which there was a transfer, those under way included."""
        with self._lock:
            going_on = time.perf_counter() - self._since[way] if self._under_way[way] else 0.0
            return self.nbytes[way], self.seconds[way] + going_on

    def close(self) -> None:
        self._closed = True
        self._readers.shutdown()
        self._writers.shutdown()

    def _counted(self, way: Way, memory: torch.Tensor, move: Callable[[], int]) -> int:
        with self._lock:
            self._under_way[way] += 1
            if self._under_way[way] == 1:
                self._since[way] = time.perf_counter()
        try:
            return move()
        finally:
            with self._lock:
                self._under_way[way] -= 1
                self.nbytes[way] += memory.numel()
                if not self._under_way[way]:
                    self.seconds[way] += time.perf_counter() - self._since[way]


class Copies:
    """Copies of one device, counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = Streams(device)
        #: Bytes so far, and seconds of the CPU in copies.
        self.nbytes = 0
        self.seconds = 0.0
        #: Seconds that the device has waited for parameters, activations and room for gradients.
        self.waited = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as time that the device waits."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def out(self, host: Sequence[torch.Tensor], moved: Sequence[torch.Tensor]) -> list[torch.Event]:
        """Copy device tensors, which may be freed then, to the host; return events of arrival."""
        begin = time.perf_counter()
        stream = self._streams.copies_out
        stream.wait_stream(self._streams.current())
        with self._streams.on(stream):
            for target, source in zip(host, moved, strict=True):
                target.copy_(source, non_blocking=True)
                if not self._streams.on_host:
                    source.record_stream(stream)
        self._count(moved, begin)
        return [] if self._streams.on_host else [stream.record_event()]

    def into(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy to the device, before what the calling thread's stream does next."""
        begin = time.perf_counter()
        stream = self._streams.copies_in
        stream.wait_stream(self._streams.current())
        with self._streams.on(stream):
            target.copy_(host, non_blocking=True)
        self._streams.current().wait_stream(stream)
        self._count([host], begin)

    def load(self, target: torch.Tensor, host: torch.Tensor, unused: Sequence[Any]) -> None:
        """Copy to the device on another thread, once it is unused there; return when it is done."""
        for event in unused:
            event.synchronize()
        stream = self._streams.copies_in
        with self._streams.on(stream):
            target.copy_(host, non_blocking=True)
        if not self._streams.on_host:
            stream.synchronize()

    def used(self) -> list[torch.Event]:
        """An event at the end of the calling thread's operations so far."""
        return [] if self._streams.on_host else [self._streams.current().record_event()]

    def _count(self, moved: Sequence[torch.Tensor], begin: float) -> None:
        self.nbytes += sum(tensor.nbytes for tensor in moved)
        self.seconds += time.perf_counter() - begin

"""A limit to what this process moves from and to a disk, by Linux's control groups.

It holds for direct I/O, and for each way apart, so that reads and writes go on side by side.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


class Limited:
    """This process in a control group of its own, until this object is gone."""

    def __init__(self, folder: Path, bytes_per_s: int) -> None:
        """Limit the disk that ``folder`` lies on.

        Raises ``ValueError`` where that cannot be done.
        """
        number = os.stat(folder).st_dev
        disk = f"{os.major(number)}:{os.minor(number)}"
        try:
            self._enter(disk, bytes_per_s)
        except OSError as error:
            raise ValueError(
                f"ssd_limit = {bytes_per_s}: needs root, a control group for block devices and a "
                f"folder on one, which {folder} on {disk} is not ({error.strerror})"
            ) from error

    def _enter(self, disk: str, bytes_per_s: int) -> None:
        first = (_GROUPS / "blkio").is_dir()
        parent = _GROUPS / "blkio" if first else _GROUPS
        group = parent / f"fuyou-{os.getpid()}"
        for old in parent.glob("fuyou-*"):
            if not Path("/proc", old.name.removeprefix("fuyou-")).exists():
                with contextlib.suppress(OSError):
                    old.rmdir()  # of a process that was killed
        group.mkdir()
        self.leave = weakref.finalize(self, _leave, parent, group)
        if first:
            for way in ("read", "write"):
                limit = group / f"blkio.throttle.{way}_bps_device"
                limit.write_text(f"{disk} {bytes_per_s}", encoding="ascii")
        else:
            both = f"{disk} rbps={bytes_per_s} wbps={bytes_per_s}"
            (group / "io.max").write_text(both, encoding="ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def _leave(parent: Path, group: Path) -> None:
    with contextlib.suppress(OSError):
        (parent / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()

"""How much memory there is, on the host and on the device."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Usage:
    """Memory of one device at one moment, in bytes."""

    used: int
    #: The most that was used so far, as far as PyTorch's allocator knows.
    peak: int
    total: int

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def utilisation(self) -> float:
        return self.used / self.total


def device_usage(device: torch.device) -> Usage:
    """Memory of ``device`` that is taken: by tensors on an accelerator, by anybody on the CPU.

    What PyTorch's allocator holds in reserve counts as free: a cached block is no tensor.
    """
    if device.type == "cpu":
        fields = _meminfo()
        if fields is None:
            return Usage(0, 0, 1)
        used = fields["MemTotal"] - fields["MemAvailable"]
        return Usage(used, used, fields["MemTotal"])
    backend = torch.get_device_module(device)
    free, total = backend.mem_get_info(device)
    allocated = backend.memory_allocated(device)
    used = total - free - (backend.memory_reserved(device) - allocated)
    return Usage(used, used - allocated + backend.max_memory_allocated(device), total)


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes of the tensors on an accelerator, without a call to its driver; ``None`` of a CPU."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).memory_allocated(device))


def available_host_memory() -> int | None:
    """Bytes that can still be taken on this host; ``None`` on systems other than Linux.

    That is what the kernel says is available, or less where a control group (a container, a batch
    job) may not take so much.
    """
    fields = _meminfo()
    if fields is None:
        return None
    return min([fields["MemAvailable"], *_left_to_groups()])


#: Files of a control group's limit and use, by version of Linux's, and fields of
#: ``memory.stat`` for file pages, which the kernel gives up before it kills.
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file"
_V2 = "memory.max", "memory.current", "active_file", "inactive_file"


def _left_to_groups(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Bytes that each limited control group around this process may still take."""
    try:
        lines = membership.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    left: list[int | None] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (groups / "memory", _V1) if controllers else (groups, _V2)
        # A group and those that it lies in. Inside a container only the root may be there.
        group = root / path.strip("/")
        around = [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
        left += [_left_to(each, *names) for each in around]
    return [nbytes for nbytes in left if nbytes is not None]


def _left_to(group: Path, limit: str, used: str, *reclaimable: str) -> int | None:
    """Bytes that ``group`` may still take; ``None`` without a limit."""
    try:
        most, taken, stat = (
            (group / name).read_text(encoding="ascii") for name in (limit, used, "memory.stat")
        )
    except OSError:
        return None
    if most.strip() == "max":
        return None
    fields = dict(line.split() for line in stat.splitlines())
    spare = sum(int(fields.get(name, 0)) for name in reclaimable)
    return max(0, int(most) - int(taken) + spare)


def _meminfo() -> dict[str, int] | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}

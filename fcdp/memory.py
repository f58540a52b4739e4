"""How much memory there is, on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Usage:
    """Memory of one device as this moment finds it, in bytes."""

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


def available_host_memory() -> int | None:
    """``MemAvailable`` of Linux in bytes; ``None`` on other systems."""
    fields = _meminfo()
    return None if fields is None else fields["MemAvailable"]


def _meminfo() -> dict[str, int] | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}

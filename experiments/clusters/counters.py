"""The kernel's counters: bytes that this machine has sent, processes that it killed for memory."""

from __future__ import annotations

from pathlib import Path

from baselines.links import interface_bytes

_INFINIBAND = Path("/sys/class/infiniband")
#: Bytes of what an InfiniBand port counts: 32-bit words, on all of its lanes together.
_WORD_BYTES = 4


def transmitted_bytes(interface: str) -> int:
    """Bytes that an interface of the caller's network namespace has sent since it exists.

    Ethernet headers are included. An InfiniBand or RoCE adapter (``mlx5_0``) has counters of its
    own, because what it sends by RDMA passes by the kernel's network interfaces. Raises
    ``ValueError`` if there is no such interface or adapter.
    """
    ports = sorted(_INFINIBAND.glob(f"{interface}/ports/*/counters/port_xmit_data"))
    if ports:
        return sum(int(port.read_text()) for port in ports) * _WORD_BYTES
    adapters = "".join(f", {path.name}" for path in sorted(_INFINIBAND.glob("*")))
    try:
        return interface_bytes(interface)[1]
    except ValueError as error:
        raise ValueError(f"{error}{adapters}") from None


def out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed since it booted because memory ran out."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, value = line.split()
        if name == "oom_kill":
            return int(value)
    return 0

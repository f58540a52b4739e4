"""The kernel's counters of what this machine has received and sent."""

from pathlib import Path

_RECEIVED, _SENT = 0, 8
_INFINIBAND = Path("/sys/class/infiniband")
#: Bytes of the unit that an InfiniBand port counts: a 32-bit word, over all of its lanes.
_WORD_BYTES = 4


def interface_bytes(interface: str) -> tuple[int, int]:
    """Bytes that an interface of the caller's network namespace has received and sent so far.

    Ethernet headers are included. Raises ``ValueError`` if there is no such interface.
    """
    # "self" would be the main thread, which may be in another namespace than the caller.
    _, _, *lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    named = (line.partition(":") for line in lines)
    counters = {name.strip(): values.split() for name, _, values in named}
    if interface not in counters:
        raise ValueError(f"interface = {interface!r}: allowed are {', '.join(sorted(counters))}")
    counts = counters[interface]
    return int(counts[_RECEIVED]), int(counts[_SENT])


def transmitted_bytes(interface: str) -> int:
    """Bytes that an interface has sent, or an InfiniBand or RoCE adapter (``mlx5_0``).

    An adapter has counters of its own, because what it sends by RDMA passes by the kernel's network
    interfaces. Raises ``ValueError`` if there is no such interface or adapter.
    """
    ports = sorted(_INFINIBAND.glob(f"{interface}/ports/*/counters/port_xmit_data"))
    if ports:
        return sum(int(port.read_text()) for port in ports) * _WORD_BYTES
    adapters = "".join(f", {path.name}" for path in sorted(_INFINIBAND.glob("*")))
    try:
        return interface_bytes(interface)[1]
    except ValueError as error:
        raise ValueError(f"{error}{adapters}") from None

"""The kernel's counters of this machine's network interfaces."""

from __future__ import annotations

from pathlib import Path

_RECEIVED, _SENT = 0, 8


def interface_bytes(interface: str) -> tuple[int, int]:
    """Bytes that an interface of the caller's network namespace has received and sent so far.

    Ethernet headers are included. Raises ``ValueError`` if there is no such interface.
    """
    # "self" would be the main thread, which may be in another namespace than the caller.
    _, _, *lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    counters = {}
    for line in lines:
        name, _, values = line.partition(":")
        counters[name.strip()] = values.split()
    if interface not in counters:
        raise ValueError(f"interface = {interface!r}: allowed are {', '.join(sorted(counters))}")
    found = counters[interface]
    return int(found[_RECEIVED]), int(found[_SENT])

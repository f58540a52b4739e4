"""The kernel's byte counters of the network interfaces that the calling process sees."""

from __future__ import annotations

from pathlib import Path

_TRANSMITTED = 8


def transmitted_bytes(interface: str) -> int:
    """Bytes that an interface of the caller's network namespace has sent since it exists.

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
    return int(counters[interface][_TRANSMITTED])

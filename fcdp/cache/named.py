"""Policies by name, as ``fcdp.shard`` and matrix files take them."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from fcdp import sizes
from fcdp.cache.policy import (
    Auto,
    Budget,
    CachePolicy,
    DeviceCache,
    DiskCache,
    HostCache,
    NoCache,
    Threshold,
)

_CALL = re.compile(r"(\w+)(?:\((.*)\))?")


def parse(text: str) -> CachePolicy:
    """The policy of a text: ``host``, ``threshold(0.8)``, ``budget(device=1 GiB, host=4 GiB)`` …

    The disk tier's file goes to the directory for temporary files (``TMPDIR``). Raises
    ``ValueError`` for another name, argument or value.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None or match[1] not in _POLICIES:
        raise ValueError(f"policy = {text!r}: allowed are {', '.join(FORMS)}")
    arguments: dict[str, str] = {}
    for part in filter(None, ((match[2] or "").split(","))):
        name, _, value = part.rpartition("=")
        arguments[name.strip()] = value.strip()
    try:
        return _POLICIES[match[1]](arguments)
    except (ValueError, KeyError) as error:
        raise ValueError(f"policy = {text!r}: {error}; allowed are {', '.join(FORMS)}") from error


def _plain(make: Callable[[], CachePolicy]) -> Callable[[dict[str, str]], CachePolicy]:
    def build(arguments: dict[str, str]) -> CachePolicy:
        if arguments:
            raise ValueError("takes no argument")
        return make()

    return build


def _threshold(arguments: dict[str, str]) -> CachePolicy:
    if set(arguments) != {""}:
        raise ValueError("takes one number")
    return Threshold(float(arguments[""]))


def _budget(arguments: dict[str, str]) -> CachePolicy:
    nbytes = {name: sizes.parse(value) for name, value in arguments.items()}
    if not nbytes or not set(nbytes) <= {"device", "host", "disk"}:
        raise ValueError("takes sizes for device, host and disk")
    return Budget(**nbytes, directory=Path(tempfile.gettempdir()) if nbytes.get("disk") else None)


_POLICIES: dict[str, Callable[[dict[str, str]], CachePolicy]] = {
    "none": _plain(NoCache),
    "device": _plain(DeviceCache),
    "host": _plain(HostCache),
    "disk": _plain(lambda: DiskCache(Path(tempfile.gettempdir()))),
    "threshold": _threshold,
    "budget": _budget,
    "auto": _plain(Auto),
}
#: The form in which each is written.
FORMS = [
    {"threshold": "threshold(0.8)", "budget": "budget(device=1 GiB, host=4 GiB)"}.get(name, name)
    for name in _POLICIES
]

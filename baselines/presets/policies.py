"""Cache policies, parsed from the names that matrix files use."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import fcdp
from baselines import sizes

_CALL = re.compile(r"(\w+)(?:\((.*)\))?")


def parse(text: str) -> fcdp.CachePolicy:
    """The policy of a text: ``host``, ``threshold(0.8)``, ``budget(device=1 GiB, host=4 GiB)`` …

    The disk tier's file goes to the directory for temporary files (``TMPDIR``). Raises
    ``ValueError`` for another name, argument or value.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None or match[1] not in _POLICIES:
        raise ValueError(f"policy = {text!r}: allowed are {', '.join(_FORMS)}")
    arguments: dict[str, str] = {}
    for part in filter(None, ((match[2] or "").split(","))):
        name, _, value = part.rpartition("=")
        arguments[name.strip()] = value.strip()
    try:
        return _POLICIES[match[1]](arguments)
    except (ValueError, KeyError) as error:
        raise ValueError(f"policy = {text!r}: {error}; allowed are {', '.join(_FORMS)}") from error


def _directory() -> Path:
    return Path(tempfile.gettempdir())


def _plain(make: Callable[[], fcdp.CachePolicy]) -> Callable[[dict[str, str]], fcdp.CachePolicy]:
    def build(arguments: dict[str, str]) -> fcdp.CachePolicy:
        if arguments:
            raise ValueError("takes no argument")
        return make()

    return build


def _threshold(arguments: dict[str, str]) -> fcdp.CachePolicy:
    if set(arguments) != {""}:
        raise ValueError("takes one number")
    return fcdp.Threshold(float(arguments[""]))


def _budget(arguments: dict[str, str]) -> fcdp.CachePolicy:
    given = {name: _bytes(value) for name, value in arguments.items()}
    if not given or not set(given) <= {"device", "host", "disk"}:
        raise ValueError("takes sizes for device, host and disk")
    return fcdp.Budget(**given, directory=_directory() if given.get("disk") else None)


def _bytes(text: str) -> int:
    return int(text) if text.isdecimal() else int(sizes.parse(text))


_POLICIES: dict[str, Callable[[dict[str, str]], fcdp.CachePolicy]] = {
    "none": _plain(fcdp.NoCache),
    "device": _plain(fcdp.DeviceCache),
    "host": _plain(fcdp.HostCache),
    "disk": _plain(lambda: fcdp.DiskCache(_directory())),
    "threshold": _threshold,
    "budget": _budget,
    "auto": _plain(fcdp.Auto),
}
_FORMS = [
    {"threshold": "threshold(0.8)", "budget": "budget(device=1 GiB, host=4 GiB)"}.get(name, name)
    for name in _POLICIES
]

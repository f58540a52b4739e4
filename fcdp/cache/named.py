"""Policies by name, as ``fcdp.shard`` and matrix files take them."""

import pkgutil
import re
import tempfile
from ast import literal_eval
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

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

_CALL = re.compile(r"(\w+|[\w.]+:\w+)(?:\((.*)\))?")


def parse(text: str) -> CachePolicy:
    """The policy of a text: ``host``, ``threshold(0.8)``, ``budget(device=1 GiB, host=4 GiB)`` …

    ``package.module:Class(size=1 GiB)`` imports the module and makes its class. The disk tier's
    file goes to the directory for temporary files (``TMPDIR``). Raises ``ValueError`` for another
    name, argument or value, and for a module or a class that is not there or no policy.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None or not (":" in match[1] or match[1] in _POLICIES):
        raise ValueError(f"policy = {text!r}: allowed are {', '.join(FORMS)}")
    arguments: dict[str, str] = {}
    try:
        for part in filter(None, ((match[2] or "").split(","))):
            name, _, value = map(str.strip, part.rpartition("="))
            if name in arguments:
                raise ValueError(f"{name or 'a value without a name'} is given twice")
            arguments[name] = value
        return _POLICIES.get(match[1], partial(_own, match[1]))(arguments)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"policy = {text!r}: {error}; allowed are {', '.join(FORMS)}") from error


def imported(name: str) -> Any:
    """Import ``package.module:name``. Raises ``ValueError`` where that fails."""
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # what a module does while it is imported
        raise ValueError(f"cannot be imported: {error}") from error


def _own(name: str, arguments: dict[str, str]) -> CachePolicy:
    """A policy that is not this library's. Nothing but a policy's class is called."""
    kind: Any = imported(name)
    if not (isinstance(kind, type) and callable(getattr(kind, "place", None))):
        raise ValueError("is no class with a method place")
    values = {key: _value(text) for key, text in arguments.items()}
    policy: CachePolicy = kind(*([values.pop("")] if "" in values else []), **values)
    if not hasattr(policy, "directory"):
        raise ValueError("has no directory, which is None without the disk tier")
    return policy


def _value(text: str) -> Any:
    """A number, ``True``, ``False`` or ``None``, bytes of a size, or else the text itself."""
    for read in (literal_eval, sizes.parse):
        with suppress(ValueError, SyntaxError):
            return read(text)
    return text


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
    for name in (*_POLICIES, "package.module:Class")
]

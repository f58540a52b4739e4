"""The public names of ``fcdp``: no module below it has one of them, which would hide it."""

from importlib import import_module
from typing import TYPE_CHECKING

from fcdp.api import (
    accumulate,
    cache_parameters,
    discard,
    invalidate,
    is_cached,
    ledger,
    shard,
    unchanged,
)
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
from fcdp.checkpoint import load, save
from fcdp.codec import BlockInt4, BlockInt8, Codec
from fcdp.counts import Ledger
from fcdp.exporting import export, save_adapters
from fcdp.options import CacheOptions, CommOptions
from fcdp.pretrained import load_pretrained
from fcdp.topology import Topology

if TYPE_CHECKING:
    from fcdp.delta.settings import Delta, Exact
    from fcdp.publication.publisher import Publication, publish
    from fcdp.publication.subscriber import Subscriber

#: Names from packages that the library does without, and that are imported with their first use.
_PLUGGED_IN = {
    "Delta": "fcdp.delta.settings",
    "Exact": "fcdp.delta.settings",
    "Publication": "fcdp.publication.publisher",
    "Subscriber": "fcdp.publication.subscriber",
    "publish": "fcdp.publication.publisher",
}


def __getattr__(name: str) -> object:
    if name not in _PLUGGED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_PLUGGED_IN[name]), name)
    except ModuleNotFoundError as error:
        package = _PLUGGED_IN[name].rpartition(".")[0]
        if not f"{error.name}.".startswith(f"{package}."):
            raise
        raise ModuleNotFoundError(
            f"fcdp.{name}: this installation of fcdp lacks the package {package}; all else of it "
            "works without",
            name=error.name,
        ) from error


__all__ = [
    "Auto",
    "BlockInt4",
    "BlockInt8",
    "Budget",
    "CacheOptions",
    "CachePolicy",
    "Codec",
    "CommOptions",
    "Delta",
    "DeviceCache",
    "DiskCache",
    "Exact",
    "HostCache",
    "Ledger",
    "NoCache",
    "Publication",
    "Subscriber",
    "Threshold",
    "Topology",
    "accumulate",
    "cache_parameters",
    "discard",
    "export",
    "invalidate",
    "is_cached",
    "ledger",
    "load",
    "load_pretrained",
    "publish",
    "save",
    "save_adapters",
    "shard",
    "unchanged",
]

"""The public names of ``fcdp``: no module below it has one of them, which would hide it."""

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
from fcdp.codec import BlockInt4, BlockInt8, Codec, Delta, Exact
from fcdp.counts import Ledger
from fcdp.exporting import export, save_adapters
from fcdp.publication.publisher import Publication, publish
from fcdp.publication.subscriber import Subscriber
from fcdp.topology import Topology

__all__ = [
    "Auto",
    "BlockInt4",
    "BlockInt8",
    "Budget",
    "CachePolicy",
    "Codec",
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
    "publish",
    "save",
    "save_adapters",
    "shard",
    "unchanged",
]

"""Fully Cached Data Parallel (arXiv 2602.06499) for any FSDP2 model.

ZeRO-3 that keeps gathered parameters in the node's host memory: a layer crosses the slow network
between nodes once a step and is rebuilt inside the node afterwards; frozen parameters cross once.
"""

from fcdp.api import (
    accumulate,
    cache_parameters,
    discard,
    invalidate,
    is_cached,
    ledger,
    shard,
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
from fcdp.codec import BlockInt4, BlockInt8, Codec, Delta
from fcdp.export import export, save_adapters
from fcdp.ledger import Ledger
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
    "HostCache",
    "Ledger",
    "NoCache",
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
    "save",
    "save_adapters",
    "shard",
]

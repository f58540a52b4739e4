"""The cached gather: across nodes when a unit has changed, from the cache when it has not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.profiler import record_function

from fcdp.cache import Cache
from fcdp.exchange import all_gather
from fcdp.ledger import Ledger, gather_phase
from fcdp.staleness import Staleness
from fcdp.topology import Topology
from fcdp.unit import Unit


class CachedGather(AllGather):
    """FSDP2's all-gather of one unit, rank order kept: output is (nodes, L, shard numel).

    A stale unit: this rank gathers the shards of its ``local_rank`` from all nodes, 1/L of the
    unit, stores them, and each node gathers the rest inside. A fresh unit: the stored shards take
    the place of the first half (paper: FCDP-Sched; nothing crosses nodes).
    """

    def __init__(
        self,
        unit: Unit,
        topology: Topology,
        cache: Cache,
        staleness: Staleness,
        ledger: Ledger,
    ) -> None:
        self._unit = unit
        self._topology = topology
        self._cache = cache
        self._staleness = staleness
        self._ledger = ledger

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather ``input_tensor`` (s) of all ranks into ``output_tensor`` (nodes·L·s).

        Complete in stream order when it returns, so there is no work to hand out for
        ``async_op``: FSDP2's own streams overlap it with compute.
        """
        unit, topology = self._unit, self._topology
        size = input_tensor.numel() * input_tensor.itemsize
        assert size == unit.shard_bytes, f"{unit.name}: {size} bytes, planned {unit.shard_bytes}"
        by_node = output_tensor.view(topology.nodes, topology.ranks_per_node, -1)
        own = by_node[:, topology.local_rank]
        if topology.nodes > 1:
            self._staleness.settle(unit)
            if self._cache.generation(unit) == unit.generation:
                with record_function(f"fcdp::cache_load {unit.name}"):
                    self._read(own)
            else:
                with record_function(f"fcdp::gather_inter {unit.name}"):
                    own = self._cross(output_tensor, input_tensor)
        with record_function(f"fcdp::gather_intra {unit.name}"):
            self._spread(by_node, own)

    def _read(self, own: torch.Tensor) -> None:
        """Put the cached shards where the gather inside the node expects them, in its output."""
        self._ledger.hits += 1
        count = self._cache.load(self._unit, own.unbind())
        self._ledger.add("host_to_device", gather_phase(), count)

    def _cross(self, output: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Gather this ``local_rank``'s shards from all nodes: (nodes, s). Stores them."""
        topology = self._topology
        self._ledger.misses += 1
        if topology.ranks_per_node == 1:
            slice_ = output  # already laid out as it must be
        else:
            slice_ = torch.empty(topology.nodes * shard.numel(), dtype=shard.dtype, device=shard.device)
        all_gather(slice_, shard, topology.inter).wait()
        self._ledger.add("inter_node", gather_phase(), (topology.nodes - 1) * self._unit.shard_bytes)
        own = slice_.view(topology.nodes, -1)
        count = self._cache.store(self._unit, own)
        self._ledger.add("device_to_host", gather_phase(), count)
        return own

    def _spread(self, by_node: torch.Tensor, own: torch.Tensor) -> None:
        """Gather inside the node, once for each node's part, so that no part must be moved again."""
        ranks = self._topology.ranks_per_node
        if ranks == 1:
            return
        parts = [
            all_gather(part.view(-1), shard, self._topology.intra)
            for part, shard in zip(by_node.unbind(), own.unbind(), strict=True)
        ]
        for part in parts:
            part.wait()
        count = (ranks - 1) * self._topology.nodes * self._unit.shard_bytes
        self._ledger.add("intra_node", gather_phase(), count)

"""The cached gather: across nodes when a unit has changed, from the cache when it has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.profiler import record_function

from fcdp.cache import Cache
from fcdp.codec import Codec
from fcdp.exchange import Buffers, Pending, all_gather, any_rank, swap, wait_all
from fcdp.ledger import Ledger, Phase, gather_phase
from fcdp.staleness import Staleness
from fcdp.topology import Topology
from fcdp.unit import Unit


class CachedGather(Buffers, AllGather):
    """FSDP2's all-gather of one unit, rank order kept: output is (nodes, L, shard numel).

    A stale unit: this rank gathers the shards of its ``local_rank`` from all nodes, 1/L of the
    unit, stores them, and each node gathers the rest inside. A fresh unit: the stored shards take
    the place of the first half (paper: FCDP-Sched; nothing crosses nodes).

    With a codec, shards cross nodes encoded, and the output has every shard, this rank's own
    included, as it decodes: all nodes compute with equal weights. The cache keeps decoded shards.
    """

    def __init__(
        self,
        unit: Unit,
        topology: Topology,
        cache: Cache,
        staleness: Staleness,
        ledger: Ledger,
        codec: Codec | None,
    ) -> None:
        self._unit = unit
        self._topology = topology
        self._cache = cache
        self._staleness = staleness
        self._ledger = ledger
        self._latest: Gathering | None = None
        self._codec = codec

    @property
    def pending(self) -> bool:
        """Whether nobody has waited for the latest gather: it was prefetched and not used."""
        return self._latest is not None and not self._latest.done

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (s) of all ranks into ``output_tensor`` (nodes·L·s).

        On an accelerator everything is queued on the current stream and nothing is left to wait
        for. On the CPU the first exchange is under way when the call returns, whatever
        ``async_op`` says: FSDP2 waits for the returned work where it needs the parameters, so
        that what it prefetches travels while it computes.
        """
        size = input_tensor.numel() * input_tensor.itemsize
        assert size == self._unit.shard_bytes, (
            f"{self._unit.name}: {size} bytes, planned {self._unit.shard_bytes}"
        )
        work = self._latest = self._start(output_tensor, input_tensor)
        if output_tensor.device.type == "cpu":
            return work
        work.wait()
        return None

    def _start(self, output: torch.Tensor, shard: torch.Tensor) -> Gathering:
        topology = self._topology
        by_node = output.view(topology.nodes, topology.ranks_per_node, -1)
        own = by_node[:, topology.local_rank].unbind()
        if own[topology.node].data_ptr() != shard.data_ptr():
            own[topology.node].copy_(shard)
        phase = gather_phase()
        if topology.nodes > 1:
            self._staleness.settle(self._unit)
            sent = self._encode(own[topology.node])
            if self._hit():
                gathering = self._read(by_node, own, phase)
            else:
                gathering = self._cross(by_node, own, sent, phase)
            self._cache.follow(self._unit)
            return gathering
        return Gathering(self._spread(by_node, phase))

    def _encode(self, shard: torch.Tensor) -> torch.Tensor:
        """What crosses nodes of this rank's shard, which becomes what others make of it."""
        if self._codec is None:
            return shard
        encoded = self._codec.encode(shard)
        self._codec.decode(encoded, shard)
        return encoded

    def _hit(self) -> bool:
        """Whether the cache serves this gather: on all ranks or on none."""
        if self._cache.stale(self._unit):
            return False
        held = self._cache.holds(self._unit)
        if not self._cache.fallible(self._unit):
            return held
        (lost,) = any_rank([not held], self._topology)
        if not lost:
            self._cache.settle(self._unit)
        return not lost

    def _read(self, by_node: torch.Tensor, own: Sequence[torch.Tensor], phase: Phase) -> Gathering:
        """Put the cached shards where the gather inside the node expects them; then spread them."""
        with record_function(f"fcdp::cache_load {self._unit.name}"):
            self._cache.load(self._unit, own, phase)
        self._ledger.hits += 1
        return Gathering(self._spread(by_node, phase))

    def _cross(
        self,
        by_node: torch.Tensor,
        own: Sequence[torch.Tensor],
        sent: torch.Tensor,
        phase: Phase,
    ) -> Gathering:
        """Gather this ``local_rank``'s shards from the other nodes; then store and spread them."""
        self._cache.poison(self._unit)
        others = [node for node in range(len(own)) if node != self._topology.node]
        received = {
            node: own[node] if self._codec is None else torch.empty_like(sent) for node in others
        }

        def store_and_spread() -> Sequence[Pending]:
            if self._codec is not None:
                for node, encoded in received.items():
                    self._codec.decode(encoded, own[node])
            with record_function(f"fcdp::cache_store {self._unit.name}"):
                self._cache.store(self._unit, own, phase)
            return self._spread(by_node, phase)

        with record_function(f"fcdp::gather_inter {self._unit.name}"):
            works = swap(
                [*received.items()], [(node, sent) for node in others], self._topology.inter
            )
        self._ledger.misses += 1
        self._ledger.add("inter_node", phase, len(others) * sent.numel() * sent.itemsize)
        return Gathering(works, store_and_spread)

    def _spread(self, by_node: torch.Tensor, phase: Phase) -> Sequence[Pending]:
        """Gather inside the node, once for each node's part: no part has to move afterwards."""
        nodes, ranks, _ = by_node.shape
        if ranks == 1:
            return []
        self._ledger.add("intra_node", phase, nodes * (ranks - 1) * self._unit.shard_bytes)
        with record_function(f"fcdp::gather_intra {self._unit.name}"):
            return all_gather([part.view(-1) for part in by_node.unbind()], self._topology.intra)


class Gathering(dist.Work):
    """Exchanges under way, and what follows them."""

    def __init__(
        self,
        works: Sequence[Pending],
        proceed: Callable[[], Sequence[Pending]] | None = None,
    ) -> None:
        super().__init__()
        self._works = works
        self._proceed = proceed
        self.done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the current stream after the whole gather (block, on the CPU)."""
        wait_all(self._works)
        self._works = []
        if self._proceed is not None:
            proceed, self._proceed = self._proceed, None
            wait_all(proceed())
        self.done = True
        return True

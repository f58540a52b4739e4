"""FSDP2's own gathers over this repository's exchanges: inside the node, or over all nodes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fcdp import Topology, exchange, fsdp2
from fcdp.all_gather import Gathering
from fcdp.counts import Ledger, in_backward
from fcdp.exchange import Pending
from fcdp.fsdp2 import AllGather


class NodeGather(fsdp2.DefaultAllocMixin, AllGather):
    """The all-gather of one FSDP module that is sharded inside the node."""

    def __init__(self, topology: Topology, module: FSDPModule) -> None:
        self._topology = topology
        self._module = module

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (s), which FSDP2 has copied to its place in the output.

        On the CPU the first exchange is under way then, and FSDP2 waits for the returned work where
        it needs the parameters; on an accelerator all is queued.
        """
        works = exchange.all_gather([output_tensor], group, [input_tensor], ring=True)
        if output_tensor.is_cpu:
            exchanges = self._topology.exchanges
            return Gathering(works, None, exchanges=exchanges, forget=self._forget)
        exchange.wait_all(works)
        return None

    def _forget(self) -> None:
        for group in fsdp2.param_groups(self._module):
            fsdp2.forget_gather(group)


class HierarchicalGather(NodeGather):
    """The all-gather of one FSDP module that is sharded over all ranks, which run on CPUs.

    Ranks exchange their shards with their partners on other nodes, and then, inside the node, what
    they have received: each byte of another node arrives once.
    """

    def __init__(self, topology: Topology, module: FSDPModule, ledger: Ledger) -> None:
        super().__init__(topology, module)
        self._ledger = ledger

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Begin to exchange ``input_tensor`` (s) with the partners; the work brings the rest."""
        topology, output, shard = self._topology, output_tensor, input_tensor
        nodes, ranks = topology.nodes, topology.ranks_per_node
        received = output.view(nodes, ranks, -1)[:, topology.local_rank]
        self._ledger.add_both(
            "backward" if in_backward() else "forward",
            (nodes - 1) * shard.nbytes,
            nodes * (ranks - 1) * shard.nbytes,
        )
        with topology.exchanges:
            works = exchange.swap_rows([received], [shard], topology.inter)

        def inside() -> Sequence[Pending]:
            return exchange.all_gather(output.chunk(nodes), topology.intra, ring=True)

        return Gathering(works, inside, exchanges=topology.exchanges, forget=self._forget)

"""The hierarchical reduce-scatter: inside the node first, then 1/L of it across nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.profiler import record_function

from fcdp.encoded import EncodedReduce
from fcdp.exchange import Buffers, reduce_scatter, wait_all
from fcdp.ledger import Ledger
from fcdp.sums import Sums
from fcdp.topology import Topology
from fcdp.unit import Unit

_Op = dist.ReduceOp | dist.ReduceOp.RedOpType


class HierarchicalReduce(Buffers, ReduceScatter):
    """FSDP2's gradient reduce-scatter of one unit, rank order kept: input is (nodes, L, s).

    While ``deferring``, sums stay inside the node, (nodes, s) a rank, until the last micro-batch;
    they are kept in fp32 or better, as FSDP2 keeps accumulated gradients, wherever ``sums`` keeps
    them. What crosses nodes crosses as ``encoded`` has it, if given.
    """

    def __init__(
        self,
        unit: Unit,
        topology: Topology,
        sums: Sums,
        ledger: Ledger,
        encoded: EncodedReduce | None,
    ) -> None:
        self._unit = unit
        self._topology = topology
        self._sums = sums
        self._ledger = ledger
        self._encoded = encoded
        #: Set by ``fcdp.accumulate``: this is not the last micro-batch.
        self.deferring = False

    @property
    def pending(self) -> bool:
        """Whether sums wait that have not crossed nodes."""
        return self._sums.numel > 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _Op,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (nodes·L·s) over all ranks into ``output_tensor`` (s).

        While deferring, ``output_tensor`` is zero: FSDP2 adds it to ``.grad``, which then holds
        the whole sum after the last micro-batch. Complete in stream order when it returns.
        """
        topology = self._topology
        with record_function(f"fcdp::reduce_intra {self._unit.name}"):
            if topology.nodes == 1:
                self._reduce_in_node(output_tensor, input_tensor, op)
                return
            partial = input_tensor
            if topology.ranks_per_node > 1:
                partial = input_tensor.new_empty(input_tensor.numel() // topology.ranks_per_node)
                self._reduce_in_node(partial, input_tensor, op)
        if self.deferring:
            self._defer(partial)
            output_tensor.zero_()
            return
        with record_function(f"fcdp::reduce_inter {self._unit.name}"):
            # PREMUL_SUM scales its input: where the node has reduced with it, once already.
            scaled = topology.ranks_per_node > 1 and op != dist.ReduceOp.AVG
            across = dist.ReduceOp.SUM if scaled else op
            self._reduce_across(output_tensor, self._release(partial), across)

    def discard(self) -> None:
        """Forget the sums that wait, as after a failed step."""
        self._sums.discard()

    def _reduce_in_node(self, partial: torch.Tensor, gradients: torch.Tensor, op: _Op) -> None:
        """Reduce (nodes, L, s) to (nodes, s), once for each node's part: no part moves twice."""
        nodes = self._topology.nodes
        outputs, buffers = partial.view(nodes, -1).unbind(), gradients.view(nodes, -1).unbind()
        wait_all(reduce_scatter(outputs, buffers, op, self._topology.intra))
        sent = (self._topology.ranks_per_node - 1) * partial.numel() * partial.itemsize
        self._ledger.add("intra_node", "reduce", sent)

    def _reduce_across(self, output: torch.Tensor, partial: torch.Tensor, op: _Op) -> None:
        if self._encoded is not None:
            assert op == dist.ReduceOp.SUM, f"{op}: the engine asks FSDP2 for sums"
            sent = self._encoded.reduce(output, partial)
        else:
            wait_all(reduce_scatter([output], [partial], op, self._topology.inter))
            sent = (self._topology.nodes - 1) * output.numel() * output.itemsize
        self._ledger.add("inter_node", "reduce", sent)

    def _defer(self, partial: torch.Tensor) -> None:
        self._check_layout(partial)
        # With one rank a node ``partial`` is FSDP2's own buffer, which it will reuse.
        self._sums.add(partial, owned=self._topology.ranks_per_node > 1)

    def _release(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over all micro-batches, in the reduce dtype; nothing waits afterwards."""
        if not self.pending:
            return partial
        self._check_layout(partial)
        return self._sums.take(partial)

    def _check_layout(self, partial: torch.Tensor) -> None:
        if self.pending and self._sums.numel != partial.numel():
            raise RuntimeError(
                f"{self._unit.name}: other parameters received gradients in this micro-batch than "
                "in the ones before it; run such micro-batches without fcdp.accumulate, or call "
                "set_reduce_scatter_unused_params(True) on the module"
            )

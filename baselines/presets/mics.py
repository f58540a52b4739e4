"""MiCS over this repository's exchanges: sharded inside the node, replicated across."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from baselines.presets.collectives import NodeGather
from baselines.pytorch.fsdp2 import FSDP2
from baselines.pytorch.fsdp2 import build as sharded
from baselines.strategy import Job
from fcdp import exchange, fsdp2
from fcdp.fsdp2 import ReduceScatter


def build(model: nn.Module, job: Job) -> FSDP2:
    """Shard the model; intra-node collectives are those of ``fcdp``, sums cross once per step."""
    trainable = sharded(model, job)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(NodeGather(job.topology, module))
            module.set_custom_reduce_scatter(_NodeReduce())
            if job.topology.mesh.device_type == "cpu":
                module.set_force_sum_reduction_for_comms(True)
    return trainable


class _NodeReduce(fsdp2.DefaultAllocMixin, ReduceScatter):
    """The intra-node reduce-scatter, whose result FSDP2 all-reduces across nodes."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        works = exchange.reduce_scatter([output_tensor], [input_tensor], op=op, group=group)
        exchange.wait_all(works)

"""Whether FCDP will help on a measured cluster, by closed forms that can be checked by hand.

A layer of W bytes on n nodes of L ranks. Across nodes a gather sends (n−1)/n · W from each node;
inside the node each rank sends (L−1)/L · W. ZeRO-3 does both for every gather, twice a micro-batch,
and reduces once. FCDP crosses nodes once a step, and only with what is trained; any other gather
copies (n−1)/n · W/L a rank from host memory and gathers inside the node. Communication is taken to
hide perfectly behind compute, which favours ZeRO-3; activations and the optimizer are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from experiments.preflight.schema import Preflight
from simulation.transformer import Tuning

#: Below this, a difference is none.
_NOTABLE = 1.1
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Workload:
    """The training to be judged."""

    parameters: float
    layers: int
    #: A rank and micro-batch.
    tokens: int
    accumulation: int = 1

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "tokens", "accumulation"):
            value = getattr(self, name)
            if not 1 <= value < math.inf:
                raise ValueError(f"{name} = {value}: allowed are numbers from 1")

    @classmethod
    def typical(cls, device: str) -> Workload:
        """What this device would train: 7B on a GPU, a model of the small matrices on CPUs."""
        return cls(3.4e6, 4, 128) if device == "cpu" else cls(7e9, 32, 4096)

    @property
    def layer_bytes(self) -> float:
        """Weights of a layer as they are gathered, in 16 bits."""
        return _ELEMENT_BYTES * self.parameters / self.layers


@dataclass(frozen=True)
class Advice:
    """The answer for one kind of tuning."""

    tuning: Tuning
    #: One layer, once, in seconds: gathered across nodes, or from host memory.
    gather_across_s: float
    gather_from_host_s: float
    #: A step, in seconds.
    compute_s: float
    zero3_s: float
    fcdp_s: float
    helps: bool
    why: str

    @property
    def speed_up(self) -> float:
        """ZeRO-3's step over FCDP's."""
        return self.zero3_s / self.fcdp_s


def advise(measured: Preflight, work: Workload, tuning: Tuning) -> Advice:
    """ZeRO-3 next to FCDP, and which of its costs decides."""
    across = _across(measured, work)
    inside = _inside(measured, work)
    from_host = _copy(measured, work) + inside
    compute = _compute(measured, work, tuning)
    micro_batches, layers = work.accumulation, work.layers
    trained = 1 if tuning == "full" else 0
    zero3 = layers * micro_batches * (2 + trained) * (across + inside)
    fcdp = layers * (
        trained * 2 * (across + inside)  # the first gather, and the reduction of the last
        + (2 * micro_batches - trained) * from_host
        + trained * (micro_batches - 1) * inside  # reductions that stay in the node
    )
    steps = max(compute, zero3), max(compute, fcdp)
    helps = measured.nodes > 1 and steps[0] / steps[1] >= _NOTABLE
    needed = (measured.nodes - 1) / measured.nodes * _ELEMENT_BYTES * work.parameters
    if needed > measured.host.free_bytes:
        helps = False
    return Advice(
        tuning=tuning,
        gather_across_s=across + inside,
        gather_from_host_s=from_host,
        compute_s=compute,
        zero3_s=steps[0],
        fcdp_s=steps[1],
        helps=helps,
        why=_why(measured, helps, needed, compute, zero3, across, from_host - inside, inside),
    )


def _why(
    measured: Preflight,
    helps: bool,
    needed: float,
    compute: float,
    zero3: float,
    across: float,
    copy: float,
    inside: float,
) -> str:
    if measured.nodes == 1:
        return "on one node nothing crosses nodes"
    if needed > measured.host.free_bytes:
        return (
            f"its cache needs {needed / 1e9:.1f} GB of host memory a node, and "
            f"{measured.host.free_bytes / 1e9:.1f} GB are free"
        )
    if zero3 <= compute:
        return "ZeRO-3's traffic takes less time than the compute that it hides behind"
    if helps:
        return "crossing nodes takes longer than a copy from host memory, and compute hides neither"
    if copy + inside > across / _NOTABLE:
        slow = "the copy from host memory" if copy > inside else "the gather inside the node"
        return f"{slow} takes about as long as crossing nodes"
    return "what FCDP must send as well, first gathers and gradients, takes most of the time"


def _across(measured: Preflight, work: Workload) -> float:
    link = measured.links.inter_node_all_gather
    share = (measured.nodes - 1) / measured.nodes
    return 0.0 if link is None else link.seconds(share * work.layer_bytes)


def _inside(measured: Preflight, work: Workload) -> float:
    link = measured.links.intra_node_all_gather
    ranks = measured.ranks_per_node
    return 0.0 if link is None else link.seconds((ranks - 1) / ranks * work.layer_bytes)


def _copy(measured: Preflight, work: Workload) -> float:
    host, nodes = measured.host, measured.nodes
    a_rank = (nodes - 1) / nodes * work.layer_bytes / measured.ranks_per_node
    return a_rank / (host.to_device_bytes_per_s or host.copy_bytes_per_s)


def _compute(measured: Preflight, work: Workload, tuning: Tuning) -> float:
    """2 operations a weight and token in forward; 2 more for inputs, 2 for trained weights."""
    operations = 6 if tuning == "full" else 4
    rates = measured.compute.matmul_flops_per_s
    rate = rates["float32"] if measured.compute.device == "cpu" else rates["bfloat16"]
    return operations * work.parameters * work.tokens * work.accumulation / rate

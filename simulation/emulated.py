"""The emulated clusters that the committed records were measured on: one host of two cores.

All ranks share its cores: for computing, for the kernel's work on what they send, and for Python.
The constants are fitted to records of unshaped links, which have no other limit. Steps over shaped
links are then predicted, and compared with measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from simulation import framing
from simulation.hardware import GB, Gpu, Hardware, Overheads, share_of_peak
from simulation.prediction import Prediction
from simulation.workload import Workload

#: Whether all nodes share the host's cores, or each has cores of its own.
Cores = Literal["shared", "own"]
#: TCP's headers and acknowledgements over frames of 9000 bytes take the rest, by the counters.
PAYLOAD_SHARE = 0.988
#: Bytes per second of copies in memory, all cores together.
_COPY_BYTES_PER_S = 10 * GB


@dataclass(frozen=True, kw_only=True)
class Constants(Overheads):
    """Costs of computing and sending on one host, all cores together."""

    #: Operations per second of matrix products in fp32.
    flops: float


#: Matrices whose cells without a limit on their links the constants are fitted to: of nodes that
#: share the cores, and of nodes with a core of their own each.
FITTED_TO: Mapping[Cores, Sequence[str]] = {
    "shared": ("unshaped", "parity"),
    "own": ("reference", "slow-link"),
}
#: Matrices to whose cells with a limit they are fitted too, with the fewest micro-batches of these:
#: cells without a limit on cores of their own have one micro-batch per step.
FITTED_TO_LIMITED: Mapping[Cores, Mapping[str, int]] = {
    "shared": {},
    "own": {"quickstart": 1, "reference": 2},
}
#: Intel Xeon at 2.5 GHz, two cores, torch 2.13, gloo; fp32.
TWO_CORES = Constants(
    flops=333.42e9,
    block_seconds={"deepspeed": 0.03206, "fcdp": 0.02350, "fsdp2": 0.01502, "ddp": 0.0},
    step_seconds={"deepspeed": 0.04413, "fcdp": 0.001941, "fsdp2": 0.009594, "ddp": 0.007018},
    message_seconds=0.6756e-3,
    byte_seconds=0.6102e-9,
    gathered_byte_seconds=0.0,
    activation_byte_seconds=1.1283e-9,
)
#: The same host with each node's ranks on a core of their own, which saves their moves between
#: cores. DDP's constants are those of shared cores.
OWN_CORES = Constants(
    flops=192.38e9,
    block_seconds={
        "deepspeed": 0.003814,
        "fcdp": 0.01812,
        "fsdp2": 0.009084,
        "pipeline": 0.003973,
        "ddp": 0.0,
    },
    step_seconds={
        "deepspeed": 0.02130,
        "fcdp": 0.0,
        "fsdp2": 0.0,
        "pipeline": 0.001626,
        "ddp": 0.007018,
    },
    message_seconds=0.6724e-3,
    byte_seconds=0.5978e-9,
    gathered_byte_seconds=0.1829e-9,
    activation_byte_seconds=0.1405e-9,
)
#: Constants of the committed records' host, by whether nodes share its cores.
BY_CORES: Mapping[Cores, Constants] = {"shared": TWO_CORES, "own": OWN_CORES}


def emulated(
    nodes: int,
    ranks_per_node: int,
    inter_bits_per_s: float | None,
    constants: Constants = TWO_CORES,
    memory_bytes: float = 25 * GB,
    cores: Cores = "shared",
) -> Hardware:
    """A cluster whose nodes are namespaces of one host, which share its cores or have their own.

    ``inter_bits_per_s`` limits what each node sends, ``None``: nothing does; ``memory_bytes`` is a
    node's memory.
    """
    host = Gpu(
        "emulated",
        peak_flops=constants.flops,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=_COPY_BYTES_PER_S,
        pcie_bytes_per_s=_COPY_BYTES_PER_S,
        link_bytes_per_s=_COPY_BYTES_PER_S,
    )
    sent = math.inf if inter_bits_per_s is None else PAYLOAD_SHARE * inter_bits_per_s / 8
    return Hardware(
        name=f"{nodes}x{ranks_per_node}-emulated",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=host,
        rates=share_of_peak(host, 1.0, nodes * ranks_per_node),
        inter_bytes_per_s=sent,
        intra_bytes_per_s=float("inf"),
        # A message's latency is part of what the host's cores do: see ``message_seconds``.
        inter_latency_seconds=0.0,
        intra_latency_seconds=0.0,
        host_to_device_bytes_per_s=_COPY_BYTES_PER_S,
        device_to_host_bytes_per_s=_COPY_BYTES_PER_S,
        nic_shares_pcie=False,
        host_memory_bytes=memory_bytes,
        device_reserve_bytes=0.0,
        backend="gloo",
        ranks_sharing_device=nodes * ranks_per_node,
        nodes_share_device=cores == "shared",
        overheads=constants,
    )


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran on a cluster, with its time and bytes."""

    workload: Workload
    hardware: Hardware
    seconds: float
    #: Bytes that one node sent to others.
    inter_node_bytes: float


@dataclass(frozen=True)
class Comparison:
    """A measured step and its prediction."""

    measured: MeasuredStep
    seconds: float
    inter_node_bytes: float

    @classmethod
    def of(cls, step: MeasuredStep, prediction: Prediction) -> Comparison:
        """The step beside its simulation on the cluster that it ran on."""
        return cls(step, prediction.step_seconds, prediction.inter_node_bytes)

    @property
    def relative_error(self) -> float:
        """Relative error of the predicted time; above 0 where the prediction is too slow."""
        return self.seconds / self.measured.seconds - 1

    @property
    def bytes_agree(self) -> bool:
        """Whether the bytes differ by no more than protocol overhead."""
        step = self.measured
        predicted, counted = self.inter_node_bytes, step.inter_node_bytes
        shape = step.hardware.shape
        return framing.agree(step.workload, *shape, predicted=predicted, counted=counted)

    @property
    def counted_share(self) -> float:
        """Ratio of counted to predicted bytes; 1 where nothing crosses, as on one node."""
        if not self.inter_node_bytes:
            return math.inf if self.measured.inter_node_bytes else 1.0
        return self.measured.inter_node_bytes / self.inter_node_bytes


def median_error(compared: Iterable[Comparison]) -> float:
    """Median of the absolute errors of the steps' times, as a share; there must be a step."""
    return median(abs(comparison.relative_error) for comparison in compared)


def largest_error(compared: Iterable[Comparison]) -> str:
    """The error that is farthest from none, such as ``-7 %``."""
    return f"{100 * max((comparison.relative_error for comparison in compared), key=abs):+.0f} %"


def shares(compared: Iterable[Comparison]) -> tuple[float, float]:
    """Counted over predicted bytes: the median, and that of the step that is farthest from 1."""
    ratios = [comparison.counted_share for comparison in compared]
    return median(ratios), max(ratios, key=lambda share: abs(share - 1))

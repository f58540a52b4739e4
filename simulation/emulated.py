"""The emulated clusters that the committed records were measured on: one host of two cores.

All ranks share its cores: for computing, for the kernel's work on what they send, and for Python.
``simulation.calibration`` fits the constants to unshaped records, which see no limit
but these; links that are shaped are then predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from simulation.hardware import GB, Gpu, Hardware, Overheads, share_of_peak

#: TCP's headers and acknowledgements over frames of 9000 bytes take the rest, by the counters.
PAYLOAD_SHARE = 0.988
#: Bytes per second of copies in memory, all cores together.
_COPY_BYTES_PER_S = 10 * GB


@dataclass(frozen=True, kw_only=True)
class Constants(Overheads):
    """What one host takes for computing and sending, all cores together."""

    #: Operations per second of matrix products in fp32.
    flops: float


#: Matrices whose cells without a limit on their links the constants are fitted to.
FITTED_TO = ("unshaped", "reference", "slow-link", "parity")
#: Intel Xeon at 2.5 GHz, two cores, torch 2.13, gloo; fp32.
TWO_CORES = Constants(
    flops=306.20e9,
    block_seconds={"deepspeed": 0.03437, "fcdp": 0.02396, "fsdp2": 0.01671, "ddp": 0.00152},
    step_seconds={"deepspeed": 0.04181, "fcdp": 0.00150, "fsdp2": 0.00770, "ddp": 0.00644},
    message_seconds=0.6584e-3,
    byte_seconds=0.2913e-9,
    gathered_byte_seconds=0.3347e-9,
    activation_byte_seconds=1.0684e-9,
)


def emulated(
    nodes: int,
    ranks_per_node: int,
    inter_bits_per_s: float | None,
    constants: Constants = TWO_CORES,
    memory_bytes: float = 25 * GB,
) -> Hardware:
    """A cluster whose nodes are namespaces of one host.

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
    cluster = Hardware(
        name=f"{nodes}x{ranks_per_node}-emulated",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=host,
        rates=share_of_peak(host, 1.0, nodes * ranks_per_node),
        inter_bytes_per_s=float("inf"),
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
        overheads=Overheads(
            **{one.name: getattr(constants, one.name) for one in fields(Overheads)}
        ),
    )
    if inter_bits_per_s is None:
        return cluster
    return cluster.with_inter_bandwidth(PAYLOAD_SHARE * inter_bits_per_s)

"""What preflight measured, as the cost model's hardware."""

from __future__ import annotations

import pytest

from experiments.preflight.hardware import hardware_of
from experiments.preflight.schema import Compute, Host
from simulation.hardware import gpu
from tests.experiments.preflight import made_up

GPU_COMPUTE = Compute(
    device="NVIDIA A40",
    matmul_flops_per_s={"float32": 30e12, "bfloat16": 110e12},
    alone_matmul_flops_per_s={"float32": 30e12, "bfloat16": 112e12},
    memory_bytes=47 * 10**9,
)
GPU_HOST = Host(
    copy_bytes_per_s=10e9,
    to_device_bytes_per_s=21e9,
    from_device_bytes_per_s=22e9,
    free_bytes=400 * 10**9,
)


def test_gpus_have_their_measured_rates_and_their_data_sheet() -> None:
    measured = made_up.preflight(compute=GPU_COMPUTE, host=GPU_HOST)
    found = hardware_of(measured, gpu("a40"))
    assert found.flops == pytest.approx(110e12)
    assert found.device.peak_flops == gpu("a40").peak_flops
    assert found.device.memory_bytes == 47e9
    assert found.host_to_device_bytes_per_s == 21e9
    assert found.device_to_host_bytes_per_s == 22e9
    assert found.host_memory_bytes == 400e9
    assert (found.nodes, found.ranks_per_node) == (measured.nodes, measured.ranks_per_node)
    across = measured.links.inter_node_all_gather
    assert across is not None
    assert found.inter_bytes_per_s == across.bytes_per_s
    with pytest.raises(ValueError, match="gpu: is missing; NVIDIA A40 was measured"):
        hardware_of(measured)


def test_a_link_that_was_not_measured_has_no_limit() -> None:
    assert hardware_of(made_up.preflight(nodes=1), gpu("a40")).inter_bytes_per_s == float("inf")


@pytest.mark.parametrize(("evidence", "nodes_on_host"), [("emulated", 2), ("measured", 1)])
def test_ranks_share_the_cores_and_the_memory_of_their_host(
    evidence: str, nodes_on_host: int
) -> None:
    compute = GPU_COMPUTE.model_copy(update={"device": "cpu", "memory_bytes": None})
    measured = made_up.preflight(
        compute=compute, backend="gloo", evidence=evidence, across=1e6, inside=2e6, free=160 * 10**9
    )
    found = hardware_of(measured)
    assert found.backend == "gloo"
    assert found.flops == pytest.approx(measured.compute.matmul_flops_per_s["float32"])
    assert found.host_to_device_bytes_per_s == measured.host.copy_bytes_per_s
    assert (found.inter_bytes_per_s, found.intra_bytes_per_s) == (1e6, 2e6)
    ranks_on_host = 8 * nodes_on_host
    assert found.ranks_sharing_device == ranks_on_host
    assert found.host_memory_bytes == 160e9 / nodes_on_host
    assert found.device.memory_bytes == 160e9 / ranks_on_host

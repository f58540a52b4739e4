"""What preflight measured, as the cost model's hardware."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.preflight.probe import Block
from experiments.preflight.schema import BlockShape, BlockTime, Compute, Host, hardware_of
from simulation.compute import rates_of
from simulation.hardware import gpu
from simulation.planner.search import rests_on
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
    found = hardware_of(measured, "a40")
    assert found.rates.products_per_s == pytest.approx(110e12)
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
    assert hardware_of(made_up.preflight(nodes=1), "a40").inter_bytes_per_s == float("inf")


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
    assert found.rates.flops_per_s == pytest.approx(measured.compute.matmul_flops_per_s["float32"])
    assert found.host_to_device_bytes_per_s == measured.host.copy_bytes_per_s
    assert (found.inter_bytes_per_s, found.intra_bytes_per_s) == (1e6, 2e6)
    ranks_on_host = 8 * nodes_on_host
    assert found.ranks_sharing_device == ranks_on_host
    assert found.host_memory_bytes == 160e9 / nodes_on_host
    assert found.device.memory_bytes == 160e9 / ranks_on_host


def test_a_block_that_was_timed_says_how_fast_all_computation_is() -> None:
    """Twice as slow as fitted: so are products, attention and bytes; and the range is no wider."""
    shape = BlockShape(width=4096, heads=32, sequence_length=2048, sequences=2)
    fitted = rates_of(gpu("a40"))
    seconds = 2 * fitted.seconds(shape.work())
    block = BlockTime(width=4096, heads=32, sequence_length=2048, sequences=2, seconds=seconds)
    compute = GPU_COMPUTE.model_copy(update={"block": block, "memory_bytes_per_s": 600e9})
    found = hardware_of(made_up.preflight(compute=compute, host=GPU_HOST), "a40")
    assert found.rates.products_per_s == pytest.approx(fitted.products_per_s / 2)
    assert found.rates.attention_per_s == pytest.approx(fitted.attention_per_s / 2)
    assert found.rates.bytes_per_s == pytest.approx(fitted.bytes_per_s / 2)
    assert fitted.lowest < found.rates.lowest < 1 < found.rates.highest < fitted.highest
    assert found.device.memory_bytes_per_s == 600e9
    assert "a transformer block measured by preflight" in rests_on(found)


def test_the_block_computes_what_is_counted() -> None:
    """By PyTorch's own counter of matrix products and attention, of which it counts all pairs."""
    shape = BlockShape(width=64, heads=4, sequence_length=32, sequences=2)
    inputs = torch.randn(2, 32, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Block(shape.width, shape.heads)(inputs).sum().backward()
    assert shape.work().flops == pytest.approx(counter.get_total_flops())

"""Measurements: the line through a link's samples, the file, and the cost model's hardware."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.preflight import probe
from experiments.preflight.probe import Block
from experiments.preflight.schema import Link, Preflight, TimedBlock, hardware_of
from simulation.compute import rates_of
from simulation.hardware import gpu
from simulation.planner.search import rests_on
from tests.experiments.preflight.made_up import preflight

SIZES = [4**power for power in range(5, 14)]
CPU = {"memory_bytes": None}


def fitted(samples: list[tuple[int, float]]) -> Link:
    return Link.model_validate(probe.line(2, samples))


@given(
    latency=st.floats(0, 1e-2),
    bytes_per_s=st.floats(1e5, 1e11),
    sizes=st.lists(st.sampled_from(SIZES), min_size=2, unique=True),
)
def test_a_line_is_recovered(latency: float, bytes_per_s: float, sizes: list[int]) -> None:
    link = fitted([(size, latency + size / bytes_per_s) for size in sizes])
    for sample in link.samples:
        seconds = link.latency_s + sample.bytes / link.bytes_per_s
        assert seconds == pytest.approx(sample.seconds, rel=1e-3)


def test_a_burst_that_passes_at_full_speed_does_not_raise_the_bandwidth() -> None:
    bucket, rate = 36_000, 1.25e6
    samples = [(size, 1e-4 + max(0, size - bucket) / rate) for size in SIZES[:6]]
    assert fitted(samples).bytes_per_s == pytest.approx(rate, rel=0.02)
    # Nor does noise make it negative.
    link = fitted([(1024, 0.2), (4096, 0.1)])
    assert link.bytes_per_s == pytest.approx(40960)
    assert link.latency_s >= 0


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("compute", {"matmul_flops_per_s": {"float32": 1e12}}, "bfloat16 is missing"),
        ("compute", CPU | {"matmul_flops_per_s": {"bfloat16": 1e12}}, "float32 is missing"),
        ("host", {"to_device_bytes_per_s": None}, "host.to_device_bytes_per_s: is missing"),
        ("host", {"from_device_bytes_per_s": None}, "host.from_device_bytes_per_s: is missing"),
        ("links", {"inter_node_all_gather": 1}, "links.inter_node_all_gather: Input should be"),
    ],
)
def test_the_file_is_read_again_and_what_plans_need_must_be_there(
    part: str, change: dict[str, object], problem: str, tmp_path: Path
) -> None:
    content, file = json.loads(preflight().model_dump_json()), tmp_path / "preflight.json"
    file.write_text(json.dumps(content))
    assert Preflight.read(file) == preflight()
    content["links"]["inter_node_point_to_point"] = None  # as older files have it
    file.write_text(json.dumps(content))
    assert Preflight.read(file) == preflight()
    content[part] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a preflight of this version") as error:
        Preflight.read(file)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_gpus_have_their_measured_rates_and_their_data_sheet() -> None:
    measured = preflight()
    hardware = hardware_of(measured, "a40")
    assert hardware.rates.products_per_s == pytest.approx(100e12)
    assert hardware.device.peak_flops == gpu("a40").peak_flops
    assert hardware.device.memory_bytes == 47e9
    assert hardware.host_to_device_bytes_per_s == 21e9
    assert hardware.device_to_host_bytes_per_s == 22e9
    assert hardware.host_memory_bytes == 1e12
    assert (hardware.nodes, hardware.ranks_per_node) == (measured.nodes, measured.ranks_per_node)
    assert hardware.inter_bytes_per_s == measured.links.inter_node_all_gather.bytes_per_s
    assert hardware_of(preflight(nodes=1), "a40").inter_bytes_per_s == float("inf")
    with pytest.raises(ValueError, match="gpu: is missing; a GPU was measured"):
        hardware_of(measured)


@pytest.mark.parametrize(("evidence", "nodes_on_host"), [("emulated", 2), ("measured", 1)])
def test_ranks_share_cores_and_memory_of_their_host(evidence: str, nodes_on_host: int) -> None:
    compute = preflight().compute.model_copy(update={"device": "cpu", "memory_bytes": None})
    measured = preflight(
        compute=compute, backend="gloo", evidence=evidence, across=1e6, inside=2e6, free=160 * 10**9
    )
    hardware = hardware_of(measured)
    assert hardware.backend == "gloo"
    assert hardware.rates.flops_per_s == pytest.approx(compute.matmul_flops_per_s["float32"])
    assert hardware.host_to_device_bytes_per_s == measured.host.copy_bytes_per_s
    assert (hardware.inter_bytes_per_s, hardware.intra_bytes_per_s) == (1e6, 2e6)
    ranks_on_host = 8 * nodes_on_host
    assert hardware.ranks_sharing_device == ranks_on_host
    assert hardware.host_memory_bytes == 160e9 / nodes_on_host
    assert hardware.device.memory_bytes == 160e9 / ranks_on_host


def test_a_block_that_was_timed_says_how_fast_all_computation_is() -> None:
    """Twice as slow as fitted: so are products, attention and bytes; and the range is no wider."""
    block = TimedBlock(width=4096, heads=32, sequence_length=2048, sequences=2, seconds=1)
    fitted = rates_of(gpu("a40"))
    block = block.model_copy(update={"seconds": 2 * fitted.seconds(block.work())})
    compute = preflight().compute.model_copy(update={"block": block, "memory_bytes_per_s": 600e9})
    hardware = hardware_of(preflight(compute=compute), "a40")
    assert hardware.rates.products_per_s == pytest.approx(fitted.products_per_s / 2)
    assert hardware.rates.attention_per_s == pytest.approx(fitted.attention_per_s / 2)
    assert hardware.rates.bytes_per_s == pytest.approx(fitted.bytes_per_s / 2)
    assert fitted.lowest < hardware.rates.lowest < 1 < hardware.rates.highest < fitted.highest
    assert hardware.device.memory_bytes_per_s == 600e9
    assert "a transformer block measured by preflight" in rests_on(hardware)


def test_the_block_computes_what_is_counted() -> None:
    """By PyTorch's own counter of matrix products and attention, of which it counts all pairs."""
    shape = TimedBlock(width=64, heads=4, sequence_length=32, sequences=2, seconds=1)
    inputs = torch.randn(2, 32, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        Block(shape.width, shape.heads)(inputs).sum().backward()
    assert shape.work().flops == pytest.approx(counter.get_total_flops())

"""GPUs and clusters: the table, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from simulation import hardware
from simulation.hardware import CARDS, cluster, gpu, gpu_of
from tests.simulation.workloads import paper_cluster


@pytest.mark.parametrize("name", CARDS)
def test_every_gpu_is_found_by_its_name(name: str) -> None:
    assert gpu(name).name == name
    assert gpu(name).pcie_bytes_per_s <= gpu(name).link_bytes_per_s


@pytest.mark.parametrize("name", ["A40", "h100", "", "b300"])
def test_an_unknown_gpu_is_an_error_that_names_the_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="gpu = .*allowed are a40, a100-40gb"):
        cluster(name, nodes=1, ranks_per_node=1, inter_bits_per_s=1e9)


def test_the_papers_cluster() -> None:
    found = paper_cluster()
    assert (found.nodes, found.ranks_per_node, found.world_size) == (4, 8, 32)
    assert found.device.memory_bytes == 48e9
    assert found.host_memory_bytes == 512e9
    assert found.inter_bytes_per_s == hardware.LINK_EFFICIENCY * 12.5e9
    # NVLink joins pairs only, so exchanges inside the node meet the copies on PCIe.
    assert found.intra_shares_pcie


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("ranks_per_node", -1),
        ("nodes", 1.5),
        ("inter_bytes_per_s", -1.0),
        ("inter_bytes_per_s", math.nan),
        ("intra_bytes_per_s", 0.0),
        ("matmul_efficiency", 1.5),
        ("matmul_efficiency", 0.0),
        ("host_memory_bytes", 0.0),
        ("inter_latency_seconds", -1e-6),
        ("device_reserve_bytes", math.inf),
        ("disk_read_bytes_per_s", 0.0),
    ],
)
def test_an_impossible_cluster_is_an_error_that_names_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value!r}: must be"):
        replace(paper_cluster(), **{field: value})


def test_ranks_that_share_a_device_share_its_rate() -> None:
    alone = paper_cluster()
    assert replace(alone, ranks_sharing_device=4).flops == alone.flops / 4


def test_a_link_without_limit() -> None:
    assert paper_cluster().with_inter_bandwidth(None).inter_bytes_per_s == math.inf
    assert paper_cluster().with_inter_bandwidth(8e9).inter_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
    ],
)
def test_gpus_are_known_by_what_the_driver_calls_them(model: str, name: str) -> None:
    assert gpu_of(model) is gpu(name)


@pytest.mark.parametrize("model", ["", "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_no_other_gpu_stands_in_for_one_that_is_not_known(model: str) -> None:
    assert gpu_of(model) is None

"""A preflight's figures in place of the data sheets'."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.costs.hardware import Hardware, paper_cluster
from experiments.planner.measured import measured
from experiments.preflight.schema import Compute, Link, Links
from tests.experiments.preflight.made_up import link, preflight


def applied(**changes: Any) -> Hardware:
    return measured(paper_cluster(), preflight(**changes))


def test_links_copies_and_products_are_the_measured_ones() -> None:
    hardware = applied(across=1.5e9, inside=7e9, copy=9e9, flops=100e12)
    assert hardware.inter_bytes_per_s == 1.5e9
    assert hardware.intra_bytes_per_s == 7e9
    assert hardware.host_to_device_bytes_per_s == hardware.device_to_host_bytes_per_s == 9e9
    assert hardware.flops == pytest.approx(100e12)
    assert hardware.device.memory_bytes == 48e9
    assert (hardware.nodes, hardware.ranks_per_node) == (4, 8)
    assert hardware.host_memory_bytes == paper_cluster().host_memory_bytes


def test_the_latency_of_an_exchange_is_that_of_its_messages() -> None:
    slow = Link(ranks=3, samples=link(1e9).samples, latency_s=6e-3, bytes_per_s=1e9)
    links = Links(
        inter_node_point_to_point=slow,
        inter_node_all_gather=slow,
        intra_node_point_to_point=slow,
        intra_node_all_gather=slow,
    )
    hardware = applied(links=links, nodes=3, ranks_per_node=4)
    assert hardware.inter_latency_seconds == pytest.approx(3e-3)
    assert hardware.intra_latency_seconds == pytest.approx(2e-3)


def test_what_was_not_measured_stays() -> None:
    sheet = paper_cluster()
    assert applied(nodes=1).inter_bytes_per_s == sheet.inter_bytes_per_s
    cpu = Compute(
        device="cpu",
        matmul_flops_per_s={"float32": 1e9},
        alone_matmul_flops_per_s={"float32": 1e9},
        memory_bytes=None,
    )
    emulated = applied(compute=cpu, across=1e6)
    assert emulated.inter_bytes_per_s == 1e6
    assert emulated.flops == sheet.flops
    assert emulated.host_to_device_bytes_per_s == sheet.host_to_device_bytes_per_s


def test_a_gpu_faster_than_the_one_named_is_another() -> None:
    with pytest.raises(ValueError, match="gpu = 'a40': the preflight's a GPU reaches 2.0 times"):
        applied(flops=300e12)

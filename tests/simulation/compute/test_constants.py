"""Every GPU has rates, and they say what they rest on; ranges follow what a step waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.compute.study import rates_of, with_rates
from simulation.hardware import CARDS, cluster, gpu
from simulation.planner.option import simulated, tokens_range
from simulation.rates import Rates, scale
from tests.simulation.workloads import workload

MEASURED = ("a100-40gb", "a100-80gb", "h100-sxm")


@pytest.mark.parametrize("name", CARDS)
def test_rates_say_what_they_rest_on(name: str) -> None:
    rates = rates_of(gpu(name))
    assert rates.lowest < 1 < rates.highest
    if name in MEASURED:
        assert (rates.basis, rates.measured_on) == ("fitted", name)
        return
    assert rates.basis == "nearest architecture"
    assert rates.measured_on in MEASURED
    narrow = rates_of(gpu(rates.measured_on))
    assert rates.lowest < narrow.lowest
    assert rates.highest > narrow.highest


def test_measured_products_take_the_place_of_the_share() -> None:
    rates = rates_of(gpu("a100-80gb"))
    faster = rates.with_products(1.2 * rates.products_per_s)
    assert faster.basis == "preflight"
    assert faster.attention_per_s == pytest.approx(1.2 * rates.attention_per_s)
    assert faster.bytes_per_s == rates.bytes_per_s


def test_scale_is_linear_first_and_then_logarithmic() -> None:
    assert scale(1) == 0
    assert scale(3) == pytest.approx(2 * scale(2), rel=0.05)
    assert scale(1024) < 4 * scale(64)
    rates = Rates(products_per_s=1.0, attention_per_s=1.0, bytes_per_s=1.0, lost_with_scale=0.1)
    assert rates.slower(1) == 1
    assert rates.slower(33) == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("gbit_s", [1, 1000])
def test_a_range_holds_the_prediction_and_the_steps_at_its_ends(gbit_s: float) -> None:
    hardware = with_rates(
        cluster("a100-80gb", nodes=4, ranks_per_node=8, inter_bits_per_s=gbit_s * 1e9)
    )
    rates = hardware.rates
    assert rates is not None
    speed = simulated(workload("fsdp2"), hardware).speed
    low, high = tokens_range(speed, hardware)
    assert low < speed.tokens_per_s < high
    for times in (rates.lowest, rates.highest):
        other = replace(
            rates,
            products_per_s=times * rates.products_per_s,
            attention_per_s=times * rates.attention_per_s,
            bytes_per_s=times * rates.bytes_per_s,
            exchanged_bytes_per_s=times * rates.exchanged_bytes_per_s,
        )
        found = simulated(workload("fsdp2"), replace(hardware, rates=other))
        assert low <= found.tokens_per_s <= high


def test_less_is_computed_again_where_checkpointing_is_selective() -> None:
    hardware = with_rates(cluster("h100-sxm", nodes=1, ranks_per_node=8, inter_bits_per_s=1e12))
    steps = [
        simulated(replace(workload("fsdp2"), recomputed=share, checkpointing=kind), hardware)
        for share, kind in ((0.0, "full"), (1.0, "selective"), (1.0, "full"))
    ]
    none, selective, full = (step.speed.tokens_per_s for step in steps)
    assert none > selective > full
    assert steps[1].speed.hfu == steps[1].speed.mfu


def test_kernels_cost_what_they_write() -> None:
    hardware = with_rates(cluster("h100-sxm", nodes=1, ranks_per_node=8, inter_bits_per_s=1e12))
    speeds = [
        simulated(replace(workload("fsdp2"), kernels=kernels), hardware).tokens_per_s
        for kernels in ("eager", "flash", "fused")
    ]
    assert speeds == sorted(speeds)

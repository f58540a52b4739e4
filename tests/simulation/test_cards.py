"""A GPU stands in one table: a row is enough for all that asks of it, and without one it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation import hardware
from simulation.compute.study import rates_of, with_rates
from simulation.hardware import CARDS, cluster, gpu_of, reported
from simulation.instances import Instance
from simulation.planner.plan import plan
from simulation.planner.request import Request

NEW = replace(
    CARDS["h100-sxm"],
    gpu=replace(CARDS["h100-sxm"].gpu, name="x100", peak_flops=2e15),
    reported_mib=90_000,
    driver=r"X100$",
)


def test_a_row_is_all_that_a_new_gpu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.CARDS, "x100", NEW)
    assert gpu_of("NVIDIA X100") is NEW.gpu
    rates = rates_of(NEW.gpu)
    assert (rates.basis, rates.measured_on) == ("nearest architecture", "h100-sxm")
    rented = Instance(provider="p", instance="x", gpu="x100", gpus=8, nic_gbit_s=400).cluster(2)
    assert rented.device.memory_bytes == 90_000 * 2**20
    made = plan(Request(model="gpt-10b", hardware=rented, strategies=("fsdp2",)))
    assert made is not None


def test_without_a_row_nothing_stands_in_for_it() -> None:
    known = cluster("a40", nodes=1, ranks_per_node=1, inter_bits_per_s=1e9)
    unknown = replace(known, device=NEW.gpu)
    for ask in (reported, with_rates):
        with pytest.raises(ValueError, match="gpu = 'x100': allowed are a40, a100-40gb"):
            ask(unknown)

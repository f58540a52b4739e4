"""LuWu's memory on a device: two layers and activations, whatever the depth."""

from __future__ import annotations

from dataclasses import replace

from simulation.luwu import footprint
from tests.simulation.workloads import hardware, workload


def test_a_device_has_two_layers_however_many_there_are() -> None:
    given = workload("luwu", recomputed=1.0)
    deep = replace(given, model=replace(given.model, layers=4 * given.model.layers))
    few, many = footprint(given, hardware()).device, footprint(deep, hardware()).device
    assert few["gathered"] == many["gathered"]
    assert few["gradients"] == many["gradients"]
    assert few["gathered"] == 2 * 2 * given.model.block_parameters


def test_host_memory_has_frozen_layers_that_are_kept_and_nothing_else() -> None:
    given = workload("luwu", lora=True)
    assert not footprint(given, hardware()).host
    kept = footprint(replace(given, cached=True), hardware())
    assert kept.host == {"cache": 8 * 2 * given.frozen}

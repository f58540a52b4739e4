"""The equations of docs/memory.md against what real small models make fcdp allocate and send."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from docs import memory
from fcdp.engine import engine_of
from fcdp.partial_gradients import PartialsPlace
from tests.fcdp.training import (
    Settings,
    batches,
    loss_of,
    make_model,
    shard_with_fcdp,
    topology_of,
    train,
)
from tests.ranks import Pools

FOLDER = Path(tempfile.gettempdir())
POLICIES: dict[str, fcdp.CachePolicy] = {
    "none": fcdp.NoCache(),
    "device": fcdp.DeviceCache(),
    "host": fcdp.HostCache(),
    "disk": fcdp.DiskCache(FOLDER),
    "never full": fcdp.Threshold(1.0),
    "always full": fcdp.Threshold(0.0),
    "budget": fcdp.Budget(device=1500, host=1500, disk=1500, directory=FOLDER),
    "auto": fcdp.Auto(),
}


def test_the_worked_example() -> None:
    """The page's one sum by hand: 10B in bf16 on 4 × 8."""
    example = memory.EXAMPLES[0]
    units = memory.blocks(example.parameters, example.layers, 2, example.cluster)
    taken = memory.cache(fcdp.HostCache(), units, example.cluster)
    assert taken.host == pytest.approx(3 / 4 * 2 * 9.87e9 / 8, rel=1e-3)
    assert taken.device == 0


def taken(settings: Settings, look_ahead: int) -> tuple[memory.Memory, memory.Memory]:
    """What one rank has allocated after two steps, and what the equations say."""
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    model = make_model(settings)
    fcdp.shard(model, topology, units=model.blocks, policy=settings.policy, look_ahead=look_ahead)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = batches(settings, topology.rank)
    for _ in range(2):
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # which keeps the root too; a step of one micro-batch does not
        loss_of(model, next(data))
    engine = engine_of(model)
    disk = engine.cache._disk_tier
    size = 0
    if disk is not None:
        disk._threads.shutdown(wait=True)
        size = os.fstat(disk._file.descriptor).st_size
    allocated = memory.Memory(
        engine.ledger.device_cache_bytes, 0, engine.ledger.host_cache_bytes, size
    )
    closed_form = memory.cache(settings.policy, engine.units, topology, look_ahead)
    return allocated, replace(closed_form, slices=0)  # on CPUs they are views of FSDP2's memory


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1)])
def test_a_rank_takes_what_the_equations_say(
    ranks: Pools, nodes: int, ranks_per_node: int, policy: str
) -> None:
    for adapter_rank, look_ahead in ((0, 1), (3, 2)):
        settings = Settings(
            nodes, ranks_per_node, adapter_rank=adapter_rank, policy=POLICIES[policy]
        )
        for allocated, expected in ranks.run(settings.world_size, taken, settings, look_ahead):
            if policy in ("auto", "always full"):
                assert allocated.device <= expected.device
                expected = replace(expected, device=allocated.device)
            assert allocated == expected
            assert (expected != memory.Memory(0, 0, 0, 0)) == (policy != "none")


def waiting(settings: Settings, place: PartialsPlace) -> list[tuple[int, int]]:
    """Bytes of partial gradients, checksums and guard on one rank, each with its equation."""
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    model = make_model(settings)
    fcdp.shard(
        model,
        topology,
        units=model.blocks,
        partial_gradients=place,
        verify=True,
        mp_policy=MixedPrecisionPolicy(param_dtype=settings.param_dtype),
    )
    with fcdp.accumulate(model, last=False):
        loss_of(model, next(batches(settings, topology.rank))).backward()
    engine, counts = engine_of(model), fcdp.ledger(model)
    held = counts.peak_pending_bytes if place == "device" else counts.host_partials_bytes
    guard = engine.staleness._guard
    assert guard is not None
    kept = [entry.checksums for entry in engine.entries.values()]
    return [
        (held, memory.partials(engine.units, topology.nodes, on_host=place == "host")),
        (
            sum(tensor.nbytes for tensor in kept if tensor is not None),
            memory.checksums(engine.units, topology.nodes),
        ),
        (
            sum(tensor.nbytes for tensor in (guard._sums, guard._differ)),
            memory.guard(engine.units, topology.nodes),
        ),
    ]


@pytest.mark.parametrize("place", ["device", "host"])
def test_partial_gradients_and_checksums(ranks: Pools, place: PartialsPlace) -> None:
    for adapter_rank, dtype in product((0, 3), (None, torch.bfloat16)):
        settings = Settings(adapter_rank=adapter_rank, param_dtype=dtype)
        for pairs in ranks.run(4, waiting, settings, place):
            for held, closed_form in pairs:
                assert held == closed_form > 0


def kept_back(settings: Settings) -> tuple[int, int, int]:
    """Bytes that error feedback keeps after a step, their equation, and what a load leaves."""
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    for _ in range(2):
        loss_of(model, next(batches(settings, topology.rank))).backward()
    held = fcdp.ledger(model).residual_bytes
    model.load_state_dict(model.state_dict())
    closed_form = memory.residuals(engine_of(model).units, topology.nodes)
    return held, closed_form, fcdp.ledger(model).residual_bytes


@pytest.mark.parametrize("adapter_rank", [0, 3])
def test_residuals(ranks: Pools, adapter_rank: int) -> None:
    settings = Settings(
        adapter_rank=adapter_rank, reduce_codec=fcdp.BlockInt8(16), error_feedback=True
    )
    for held, closed_form, left in ranks.run(4, kept_back, settings):
        assert held == closed_form > 0
        assert left == 0


def gathered_and_trained(settings: Settings) -> tuple[int, int]:
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    units = engine_of(shard_with_fcdp(make_model(settings), topology, settings)).units
    sizes = [(unit.shard_bytes * settings.world_size, unit.trainable) for unit in units]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


@pytest.mark.parametrize("adapter_rank", [0, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bytes_between_nodes(ranks: Pools, adapter_rank: int, accumulation: int) -> None:
    """Of the second step: the first also gathers what is frozen."""
    settings = Settings(
        adapter_rank=adapter_rank, accumulation=accumulation, reshard_after_forward=True
    )

    def of_the_second_step(engine: str) -> float:
        first, both = (
            ranks.run(4, train, replace(settings, steps=steps), engine)[0].ledger["inter_node"]
            for steps in (1, 2)
        )
        return settings.ranks_per_node * (sum(both.values()) - sum(first.values()))

    gathered, trained = ranks.run(4, gathered_and_trained, settings)[0]
    zero3, here = memory.traffic(gathered, trained, settings.nodes, accumulation)
    assert of_the_second_step("fcdp") == here
    if accumulation == 1:  # without a cache gradients still cross only once
        assert of_the_second_step("uncached") == zero3

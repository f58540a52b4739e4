"""The simulator's units and memory plan are those that ``fcdp.shard`` makes of the real modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import fcdp
from fcdp.arena import ALIGNMENT
from fcdp.cache.memory_plan import MemoryPlan
from fcdp.cache.named import parse
from fcdp.engine import engine_of
from simulation.hardware import cluster
from simulation.memory import place
from simulation.units import Unit, layout, shard_numel
from simulation.workload import FrozenDtype
from tests.ranks import Pools
from tests.simulation.cases import CONFIGURATIONS, Case, built
from tests.simulation.imitated.small import leave_group

#: Policies that look at no memory in use, whose tiers are decided before the first step.
POLICIES = ("none", "device", "host", "disk", "budget(device=4 kB, host=60 kB, disk=200 kB)")
#: Nothing is compared on the ``meta`` device.
UNSEEN = fcdp.CacheOptions(detect_writes=False)


class Facts(NamedTuple):
    """Facts of one unit that the memory plan, the ledger and the schedule depend on."""

    parameters: int
    #: Elements of one rank's shard, with padding.
    shard: int
    trained: bool
    reuses: int


class Plan(NamedTuple):
    """Where a policy puts the units' entries, and the bytes of one rank's host memory."""

    tiers: list[str | None]
    cache: float
    disk_buffers: float


@contextmanager
def topology_of(nodes: int, ranks_per_node: int) -> Iterator[fcdp.Topology]:
    """Rank 0 of a cluster whose groups send nothing."""
    leave_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=nodes * ranks_per_node)
    try:
        grid = init_device_mesh("cpu", (nodes, ranks_per_node), mesh_dim_names=("inter", "intra"))
        mesh = init_device_mesh("cpu", (nodes * ranks_per_node,))
        groups = {
            f"{use}{name}": grid.get_group(name)
            for use in ("", "reduce_", "control_")
            for name in ("intra", "inter")
        }
        yield fcdp.Topology(nodes, ranks_per_node, 0, mesh=mesh, **groups)
    finally:
        dist.destroy_process_group()


def by_library(case: Case) -> tuple[list[Facts], list[Plan]]:
    with topology_of(*case.shape) as topology:
        with torch.device("meta"):
            model, blocks = built(case)
        narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fcdp.shard(model, topology, units=blocks, policy="none", mp_policy=narrow, cache=UNSEEN)
        engine = engine_of(model)
        units, look_ahead = engine.units, engine.setup.cache.look_ahead
        plans = []
        for policy in POLICIES:
            plan = MemoryPlan.of(
                units, topology, parse(policy), look_ahead=look_ahead, partials_place="device"
            )
            tiers = [next(iter(plan.placement.preferences[unit]), None) for unit in units]
            plans.append(Plan([*tiers], plan.parts["cache"], plan.parts["disk buffers"]))
        facts = [
            Facts(sum(p.numel() for p in u.params), u.shard_numel, u.trainable, u.reuses)
            for u in units
        ]
        return facts, plans


def by_simulator(case: Case) -> tuple[list[Facts], list[Plan]]:
    nodes, ranks = case.shape
    units = layout(case.workload, nodes, ranks)
    facts = [simulated(unit, nodes * ranks) for unit in units.units]
    hardware = cluster("a40", nodes=nodes, ranks_per_node=ranks, inter_bits_per_s=1e9)
    plans = []
    for policy in POLICIES:
        tiers, taken = place(replace(case.workload, policy=policy), units, hardware)
        where: list[str | None] = [tiers.get(unit) for unit in units.units]
        plans.append(Plan(where, taken["host"], taken["buffers"]))
    return facts, plans


def simulated(unit: Unit, world_size: int) -> Facts:
    shard = shard_numel(unit.gathered, world_size)
    return Facts(unit.parameters, shard, unit.trained > 0, unit.reuses)


FROZEN: tuple[tuple[FrozenDtype, tuple[int, int]], ...] = (("fp32", (2, 2)), ("bf16", (2, 8)))
CASES = [
    *(Case(model, shape=shape) for model in CONFIGURATIONS for shape in ((2, 2), (3, 2))),
    # Adapters that stay gathered; that do not; that outnumber the frozen parameters of their block.
    *(
        Case(model, rank, "attention", frozen, shape)
        for model in CONFIGURATIONS
        for rank in (1, 4, 200)
        for frozen, shape in FROZEN
    ),
    *(Case(model, 1, "all", "bf16", (3, 2)) for model in CONFIGURATIONS),
    # In fp32 all of these adapters stay gathered, in several buckets; in bf16 the base is half as
    # large, and those of rank 24 and more are gathered again.
    Case("llama-3-8b", 8, "all", "bf16", (2, 8)),
    *(
        Case("llama-3-8b", rank, "attention", frozen, (2, 8))
        for rank in (16, 24, 32)
        for frozen in ("fp32", "bf16")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_units_and_memory_are_the_librarys(apart: Pools, case: Case) -> None:
    facts, plans = apart.run(1, by_library, case)[0]
    our_facts, our_plans = by_simulator(case)
    assert our_facts == facts
    for policy, library, ours in zip(POLICIES, plans, our_plans, strict=True):
        assert ours.tiers == library.tiers, policy
        # An arena gives each entry whole pages, whose size is that of the machine.
        pages = ALIGNMENT * len(facts)
        assert 0 <= library.cache - ours.cache < pages, policy
        assert 0 <= library.disk_buffers - ours.disk_buffers < 3 * ALIGNMENT, policy

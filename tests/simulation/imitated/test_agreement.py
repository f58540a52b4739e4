"""The simulator's memory model and real steps agree at both ends of the study's lengths."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from experiments.commands.memory import build
from experiments.records.cell import Cell
from experiments.records.modelled import workload_of
from simulation.imitated.accelerator import NAME, Allocations, imitated
from simulation.imitated.rank import Rank, imitated_host, world
from simulation.imitated.records import Case
from simulation.imitated.study import SEQUENCE_LENGTHS
from simulation.prediction import needed
from simulation.transformer import ModelSpec
from tests.ranks import Pools
from tests.simulation.imitated.small import case, leave_group
from tests.simulation.workloads import paper_cluster

pytestmark = pytest.mark.ranks

#: Blocks that weigh against activations of so few sequences, as at 10B.
MODEL = ModelSpec(name="wide", family="gpt2", layers=4, width=2048, heads=16, vocabulary=4000)
MICRO_BATCH = 8
NODES, RANKS_PER_NODE = 4, 8
SIXTEEN: dict[str, Any] = {"accumulation": 16, "partial_gradients": "host"}


def at(strategy: str, length: int, **more: Any) -> Case:
    usual = {"model": MODEL, "checkpointing": True, "device_bytes": 48 * 10**9}
    return case(strategy, sequence_length=length, **(usual | more))


@contextmanager
def begun(studied: Case) -> Iterator[tuple[Rank, Allocations]]:
    """A rank of the real code that has made its first step, and what its device holds."""
    leave_group()
    ranks = studied.nodes * studied.ranks_per_node
    with imitated(studied.device_bytes) as allocations, world(ranks, NAME), imitated_host():
        rank = Rank(studied, NAME, build)
        rank.step(1)
        yield rank, allocations


def real(studied: Case) -> int:
    """Most bytes that a rank's device holds in a step of the real code."""
    with begun(studied) as (rank, allocations):
        allocations.reset_peak()
        rank.step(MICRO_BATCH)
        return allocations.peak[NAME]


def resting(studied: Case) -> int:
    """Bytes that a rank's device holds between steps of the real code."""
    with begun(studied) as (rank, allocations):
        rank.step(1)
        return allocations.current[NAME]


def simulated(studied: Case) -> float:
    workload = workload_of(Cell.of_case(studied))
    hardware = replace(paper_cluster(), device_reserve_bytes=0.0)
    step = replace(workload, recomputed=1.0, micro_batch=MICRO_BATCH)
    return needed(step, hardware).device_bytes


@pytest.mark.parametrize(
    ("strategy", "length"),
    [
        ("fsdp2", SEQUENCE_LENGTHS[-1]),
        ("fcdp", SEQUENCE_LENGTHS[0]),
        ("fsdp2-hsdp-offload", SEQUENCE_LENGTHS[0]),
        ("fcdp-offload", SEQUENCE_LENGTHS[-1]),
    ],
)
def test_peaks_are_those_of_real_steps(apart: Pools, strategy: str, length: int) -> None:
    studied = at(strategy, length)
    peak = apart.run(1, real, studied)[0]
    assert 0.99 < simulated(studied) / peak < 1.09


#: Forms of FCDP beside those above, as a plan's rows have them.
FORMS: list[dict[str, Any]] = [
    {"policy": "device"},
    {"policy": "auto"},
    {"tuning": "lora"},
    {"accumulation": 3, "partial_gradients": "each"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_fcdp_have_the_planned_peak(apart: Pools, form: dict[str, Any]) -> None:
    studied = at("fcdp", SEQUENCE_LENGTHS[0]).model_copy(update=form)
    assert 0.95 < simulated(studied) / apart.run(1, real, studied)[0] < 1.05


@pytest.mark.parametrize("strategy", ["fcdp", "fcdp-offload"])
def test_sums_on_the_host_leave_three_units_of_them_on_the_device(
    apart: Pools, strategy: str
) -> None:
    waiting = {
        place: at(strategy, SEQUENCE_LENGTHS[0], accumulation=3, partial_gradients=place)
        for place in ("device", "host")
    }
    peaks = {place: apart.run(1, real, each)[0] for place, each in waiting.items()}
    for place, each in waiting.items():
        assert 0.95 < simulated(each) / peaks[place] < 1.05
    assert peaks["host"] < peaks["device"]


def test_sums_on_the_host_take_slices_and_staging_buffers_beside_what_fsdp2_takes(
    apart: Pools,
) -> None:
    """The closed form of docs/memory.md, with sixteen micro-batches."""
    fsdp2, fcdp = (
        apart.run(1, real, at(strategy, SEQUENCE_LENGTHS[0], **SIXTEEN))[0]
        for strategy in ("fsdp2", "fcdp")
    )
    block = 12 * MODEL.width**2 + 13 * MODEL.width
    of_rank = block / RANKS_PER_NODE
    # Two slices, and two entries of the other nodes' rows of one.
    slices = 2 * of_rank * (2 + 2 * (NODES - 1) / NODES)
    sums, reduced = 3 * 4 * of_rank, 2 * block
    assert fcdp == pytest.approx(fsdp2 + slices + sums + reduced, rel=0.05)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_offloaded_shards_leave_none_on_the_device(apart: Pools, tuning: str) -> None:
    on_device, offloaded = (
        apart.run(1, resting, at(strategy, SEQUENCE_LENGTHS[0], tuning=tuning))[0]
        for strategy in ("fcdp", "fcdp-offload")
    )
    assert offloaded < on_device / 50

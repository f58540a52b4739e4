"""The simulator's memory model and real steps agree at every length of the study."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.commands.memory import build
from experiments.records.cell import Cell
from experiments.records.modelled import workload_of
from simulation.imitated.accelerator import NAME, imitated
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


def at(strategy: str, length: int) -> Case:
    return case(
        strategy, model=MODEL, checkpointing=True, sequence_length=length, device_bytes=48 * 10**9
    )


def real(studied: Case) -> int:
    """Most bytes that a rank's device holds in a step of the real code."""
    leave_group()
    ranks = studied.nodes * studied.ranks_per_node
    with imitated(studied.device_bytes) as allocations, world(ranks, NAME), imitated_host():
        rank = Rank(studied, NAME, build)
        rank.step(1)
        allocations.reset_peak()
        rank.step(MICRO_BATCH)
        return allocations.peak[NAME]


def simulated(studied: Case) -> float:
    workload = workload_of(Cell.of_case(studied))
    hardware = replace(paper_cluster(), device_reserve_bytes=0.0)
    step = replace(workload, recomputed=1.0, micro_batch=MICRO_BATCH)
    return needed(step, hardware).device_bytes


@pytest.mark.parametrize("strategy", ["fsdp2", "fcdp", "fsdp2-hsdp-offload", "fcdp-offload"])
@pytest.mark.parametrize("length", [SEQUENCE_LENGTHS[0], SEQUENCE_LENGTHS[-1]])
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
        place: at(strategy, SEQUENCE_LENGTHS[0]).model_copy(
            update={"accumulation": 3, "partial_gradients": place}
        )
        for place in ("device", "host")
    }
    peaks = {place: apart.run(1, real, each)[0] for place, each in waiting.items()}
    for place, each in waiting.items():
        assert 0.95 < simulated(each) / peaks[place] < 1.05
    assert peaks["host"] < peaks["device"]

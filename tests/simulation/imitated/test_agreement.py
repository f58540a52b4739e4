"""The simulator's memory model and real steps agree at both ends of the study's lengths."""

from typing import Any

import pytest

from experiments.commands.memory import build
from simulation.imitated.accelerator import NAME, imitated
from simulation.imitated.rank import Rank, imitated_host, world
from simulation.imitated.records import Case
from simulation.imitated.study import SEQUENCE_LENGTHS
from simulation.transformer import ModelSpec
from tests.ranks import Pools
from tests.simulation.imitated.small import case, leave_group, planned

#: Blocks that weigh against activations of so few sequences, as at 10B.
MODEL = ModelSpec(name="wide", family="gpt2", layers=4, width=2048, heads=16, vocabulary=4000)
MICRO_BATCH = 8


def at(strategy: str, length: int, **more: Any) -> Case:
    usual = {"model": MODEL, "checkpointing": True, "device_bytes": 48 * 10**9}
    return case(strategy, sequence_length=length, **(usual | more))


def real(studied: Case) -> int:
    """Most bytes that a rank's device holds in a step of the real code after the first."""
    leave_group()
    ranks = studied.nodes * studied.ranks_per_node
    with imitated(studied.device_bytes) as allocations, world(ranks, NAME), imitated_host():
        rank = Rank(studied, NAME, build)
        rank.step(1)
        allocations.reset_peak()
        rank.step(MICRO_BATCH)
        return allocations.peak[NAME]


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
    assert 0.99 < planned(studied, MICRO_BATCH) / peak < 1.09


#: Forms of FCDP beside those above, as a plan's rows have them.
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("fcdp", {"policy": "device"}),
    ("fcdp", {"policy": "auto"}),
    ("fcdp", {"tuning": "lora"}),
    ("fcdp", {"accumulation": 3, "partial_gradients": "each"}),
    ("fcdp", {"accumulation": 3, "partial_gradients": "device"}),
    ("fcdp", {"accumulation": 3, "partial_gradients": "host"}),
    ("fcdp-offload", {"accumulation": 3, "partial_gradients": "host"}),
]


@pytest.mark.parametrize(("strategy", "form"), FORMS, ids=str)
def test_forms_of_fcdp_have_the_planned_peak(
    apart: Pools, strategy: str, form: dict[str, Any]
) -> None:
    studied = at(strategy, SEQUENCE_LENGTHS[0]).model_copy(update=form)
    peak = apart.run(1, real, studied)[0]
    assert 0.95 < planned(studied, MICRO_BATCH) / peak < 1.05

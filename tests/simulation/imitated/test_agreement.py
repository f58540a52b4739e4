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


#: How near plans are, and strategies with lengths that are planned so; then forms of FCDP beside
#: these, as a plan's rows have them.
SHORT, LONG = SEQUENCE_LENGTHS[0], SEQUENCE_LENGTHS[-1]
SUMMED = {"accumulation": 3, "partial_gradients": "host"}
FORMS: list[tuple[float, float, str, int, dict[str, Any]]] = [
    *((0.99, 1.09, strategy, LONG, {}) for strategy in ("fsdp2", "fcdp-offload")),
    *((0.99, 1.09, strategy, SHORT, {}) for strategy in ("fcdp", "fsdp2-hsdp-offload")),
    *((0.95, 1.05, "fcdp", SHORT, {"policy": policy}) for policy in ("device", "auto")),
    (0.95, 1.05, "fcdp", SHORT, {"tuning": "lora"}),
    *(
        (0.95, 1.05, "fcdp", SHORT, SUMMED | {"partial_gradients": place})
        for place in ("each", "device", "host")
    ),
    (0.95, 1.05, "fcdp-offload", SHORT, SUMMED),
]


@pytest.mark.parametrize(("low", "high", "strategy", "length", "form"), FORMS, ids=str)
def test_peaks_are_those_of_real_steps(
    apart: Pools, low: float, high: float, strategy: str, length: int, form: dict[str, Any]
) -> None:
    studied = at(strategy, length).model_copy(update=form)
    peak = apart.run(1, real, studied)[0]
    assert low < planned(studied, MICRO_BATCH) / peak < high

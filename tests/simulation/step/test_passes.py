"""Stages share out what a step computes: all of it, whatever the number of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.cycle import stages_of
from simulation.emulated import emulated
from simulation.hardware import Hardware
from simulation.prediction import predict
from simulation.step.schedule import StageSeconds
from tests.simulation.workloads import hardware, workload

RANKS = 4
ON = (hardware(), emulated(2, 2, None))


@given(st.integers(1, RANKS), st.sampled_from(ON), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_stages_together_take_what_a_step_of_ddp_does(
    stages: int, on: Hardware, recomputed: float, lora: bool
) -> None:
    of = workload("cyclic-ring", stages=stages, recomputed=recomputed, lora=lora)
    found = StageSeconds.of(of, stages_of(of, RANKS), on)
    assert len(found.forward) == len(found.backward) == len(found.update) == stages
    timeline = predict(replace(of, strategy="ddp"), on).timeline
    for phase, seconds in (("forward", found.forward), ("backward", found.backward)):
        names = [i for i, task in enumerate(timeline.tasks) if task.name.startswith(phase)]
        computed = sum(timeline.tasks[i].demands["compute"] for i in names)
        assert sum(seconds) == pytest.approx(computed)
    steps = ("optimizer", "calls")
    updated = sum(task.demands.get("compute", 0.0) for task in timeline.tasks if task.name in steps)
    assert sum(found.update) == pytest.approx(updated)

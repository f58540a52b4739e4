"""Micro-batches that take turns on a rank: slots' arithmetic, computation and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.step.slots import in_slot
from tests.simulation.workloads import hardware, predicted

COUNTS = st.integers(1, 12)


@given(COUNTS, st.data())
def test_every_micro_batch_goes_through_every_phase_once(
    micro_batches: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, micro_batches))
    passed = [
        found for slot in range(2 * micro_batches) for found in in_slot(slot, stages, micro_batches)
    ]
    assert sorted(passed) == [(i, p) for i in range(micro_batches) for p in range(2 * stages)]


@given(COUNTS)
def test_each_stage_has_one_micro_batch_in_every_slot(count: int) -> None:
    for slot in range(2 * count):
        phases = [phase for _, phase in in_slot(slot, count, count)]
        stages = Counter(phase if phase < count else 2 * count - 1 - phase for phase in phases)
        assert stages == dict.fromkeys(range(count), 1)


@given(COUNTS, st.data())
def test_as_many_stages_are_kept_in_every_slot(micro_batches: int, data: st.DataObject) -> None:
    """The paper's N (N + 1) / 2, forwards before backwards."""
    stages = data.draw(st.integers(1, micro_batches))
    for slot in range(2 * micro_batches):
        phases = [phase for _, phase in in_slot(slot, stages, micro_batches)]
        kept = sum(phase + 1 if phase < stages else 2 * stages - phase for phase in phases)
        assert kept == stages * (stages + 1) // 2


def test_a_step_computes_what_ddp_does_and_reduces_each_stage_once() -> None:
    turns, ddp = (
        predicted(name, accumulation=4, on=hardware(1e15)) for name in ("cyclic-interleaved", "ddp")
    )
    assert turns.inter_node_bytes == pytest.approx(2 * ddp.inter_node_bytes)  # fp32, not bf16
    computed = turns.timeline.busy_seconds()["compute"]
    assert computed == pytest.approx(ddp.timeline.busy_seconds()["compute"], rel=0.05)


def test_one_rank_sends_nothing() -> None:
    alone = replace(hardware(nodes=1), ranks_per_node=1)
    found = predicted("cyclic-interleaved", accumulation=3, stages=3, on=alone)
    assert not found.moved_bytes
    assert found.step_seconds > 0

"""What a rank of a cycle keeps: one stage's optimizer, its own stage, activations of half."""

from __future__ import annotations

import pytest

from simulation.cycle import held
from simulation.prediction import needed
from tests.simulation.workloads import hardware, paper_cluster, workload

RANKS = 16
FORMS = ("cyclic-ring", "cyclic-zero")


def test_a_ring_keeps_the_optimizer_of_one_stage() -> None:
    of = workload("cyclic-ring", stages=6)
    found, ddp = held(of, RANKS), workload("ddp")
    assert found.parameters == 4 * ddp.parameters
    largest = ddp.parameters - 5 * ddp.model.block_parameters - ddp.model.width * 2
    assert found.states == 8 * largest
    assert needed(of, hardware()).device_bytes < needed(ddp, hardware()).device_bytes


def test_zero_keeps_its_own_stage_and_what_is_outside_of_the_blocks() -> None:
    """And the stage in use; of many equal stages that is little of the model."""
    whole, part = (held(workload(f"cyclic-{form}", stages=6), RANKS) for form in ("ring", "zero"))
    model = workload("ddp").model
    own = model.block_parameters + model.embedded_parameters
    assert part.parameters == pytest.approx(4 * (own + model.root_parameters))
    assert part.versions == pytest.approx(8 * own)
    assert part.parameters < 0.5 * whole.parameters
    of_large = (needed(workload(name, large=True, stages=32), paper_cluster()) for name in FORMS)
    ring, zero = (found.device["parameters"] for found in of_large)
    assert zero < ring / 10


def test_the_update_rules_alone_keep_gradients_that_wait_a_step() -> None:
    """By v2 all but the last stage's, on the first rank; by v1 all."""
    for rule, share in (("v1", 1.0), ("v2", 0.5)):
        of = workload("cyclic", rule=rule, stages=2)
        late = held(of, RANKS).versions
        assert late == pytest.approx(4 * share * of.trained, rel=0.05)
        more = needed(of, hardware()).device["versions"]
        assert more == late


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_micro_batches_that_take_turns_keep_half_of_what_all_at_once_do(count: int) -> None:
    """The paper's (N + 1) / 2N of N micro-batches, whose stages are equal."""
    one = needed(workload("ddp", accumulation=2), hardware()).forward["activations"]
    turns = workload("cyclic-interleaved", accumulation=count, stages=count)
    found = needed(turns, hardware()).forward["activations"]
    assert found / (count * one) == pytest.approx((count + 1) / (2 * count))


def test_messages_lie_in_host_memory() -> None:
    """Two that come to each rank and two that go, of the largest stage, in fp32."""
    of = workload("cyclic-ring", stages=6)
    found = needed(of, hardware()).host["messages"]
    assert found == 8 * 4 * held(of, RANKS).states / 2

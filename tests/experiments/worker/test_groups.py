"""Cells on two groups of nodes, with a fast link inside of each and a slow one between them.

Bytes are the kernel's, of each link apart.
"""

from typing import Any

import pytest

from experiments.records.cell import ClusterSpec
from tests.experiments.cells import FAILING_WORKER, CellResult, Runner, check_failed

CLUSTER = ClusterSpec(nodes=4, ranks_per_node=1, groups=2)
INTERVAL = 2
OVER_FCDP = {"worker": "nodes", "nodes_per_worker": 2, "interval": INTERVAL}
ROUNDS = {"warmup_steps": 2, "steps": 4}
WHOLE = {"interval": INTERVAL, "held_out": 4, **ROUNDS}
#: Bytes per step on a link beside the payload: acknowledgements, headers, agreements, barriers.
FIXED_BYTES = 16_000


def links(inside: int, between: int) -> dict[str, int]:
    """Limits of the links of a group and of those between groups, in bits per second."""
    return {"inter_bandwidth_bits_per_s": inside, "inter_group_bandwidth_bits_per_s": between}


def crossing(result: CellResult, sharers: int, share: float = 1.0) -> float:
    """Bytes per step of exchanging a share of the model, there and back, among so many."""
    parameters = result.measurement.trainable_parameters
    return 2 * (sharers - 1) / sharers * parameters * share * 4


def test_co2_over_fcdp_sends_as_co2_between_groups_and_as_fcdp_inside(run: Runner) -> None:
    finished = run("co2", **ROUNDS, **OVER_FCDP, **links(10**9, 10**8))
    measured = finished.measurement
    between = measured.inter_group_bytes_per_step
    inside = finished.sent - between
    # A node has half of a worker's displacement, which crosses once in a round.
    exchanged = crossing(finished, 2, share=1 / 2) / INTERVAL
    assert exchanged <= between <= 1.05 * exchanged + FIXED_BYTES
    gathered_and_reduced = crossing(finished, 2)
    assert gathered_and_reduced <= inside <= 1.05 * gathered_and_reduced + FIXED_BYTES
    assert measured.inter_node_bytes_closed_form == exchanged + gathered_and_reduced


@pytest.mark.parametrize("strategy", ["co2", "streaming-diloco"])
def test_whole_workers_send_their_closed_form_once_in_a_round(run: Runner, strategy: str) -> None:
    finished = run(strategy, **WHOLE)
    exchanged = crossing(finished, 4) / INTERVAL
    assert finished.measurement.inter_node_bytes_closed_form == exchanged
    assert exchanged <= finished.sent <= 1.05 * exchanged + FIXED_BYTES


def test_what_is_held_out_is_measured_on_the_way_and_changes_nothing(run: Runner) -> None:
    plain = run("streaming-diloco", **WHOLE)
    evaluated = run("streaming-diloco", **WHOLE, held_out_every=2)
    losses = evaluated.measurement.held_out_losses
    assert list(losses) == [2, 4, 6]
    assert losses[6] == evaluated.measurement.held_out_loss
    assert len(set(losses.values())) == 3
    assert evaluated.measurement.losses == plain.measurement.losses
    assert evaluated.sent == pytest.approx(plain.sent, abs=FIXED_BYTES)


@pytest.mark.parametrize(
    ("settings", "how"), [({}, "SIGKILL"), (OVER_FCDP, "raise")], ids=["whole", "over fcdp"]
)
def test_a_rank_that_fails_while_the_mean_is_under_way_ends_the_cell(
    run: Runner, settings: dict[str, Any], how: str
) -> None:
    failed = run("co2", FAILING_WORKER, how, "2", **{**settings, "interval": 1})
    # Others may end the step that it failed in, and then wait for its displacement.
    assert check_failed(failed, how, 2) in ([1], [1, 2])


def test_each_link_has_its_own_limit(run: Runner) -> None:
    """FCDP over all nodes crosses both links."""
    result = run("fcdp", steps=2, **links(10**9, 2 * 10**7))
    measured = result.measurement
    between = measured.inter_group_bytes_per_step
    assert 0 < between < result.sent
    # Some of it leaves in the free burst.
    assert sum(measured.step_seconds) > 0.7 * 2 * 8 * between / 2e7

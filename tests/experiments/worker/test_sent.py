"""FCDP's bytes between nodes, by the kernel's counters: one gather and one reduction a step.

This repository is for them, so they are tested before each merge too: in a file of its own, whose
cells take no cluster that has imported DeepSpeed.
"""

from typing import Any

import pytest

from tests.experiments.cells import Runner, payload


@pytest.mark.parametrize(
    ("settings", "itemsize"),
    [({}, 4), ({"accumulation": 4, "steps": 2}, 4), ({"dtype": "bfloat16", "steps": 2}, 2)],
    ids=["full", "k4", "bfloat16"],
)
def test_fcdp_sends_one_gather_and_one_reduction_a_step(
    run: Runner, settings: dict[str, Any], itemsize: int
) -> None:
    """However many micro-batches there are; FSDP2 sends more than twice as much."""
    fcdp, least = run("fcdp", **settings), payload(run("fcdp", **settings), itemsize)
    assert fcdp.measurement.trainable_parameters == fcdp.measurement.parameters
    assert least <= fcdp.sent <= 1.05 * least
    assert fcdp.measurement.inter_node_bytes_closed_form == least
    assert run("fsdp2", **settings).sent >= 2.5 * fcdp.sent
    ledger = fcdp.measurement.ledger_bytes_per_step
    assert sum(ledger["inter_node"].values()) == pytest.approx(fcdp.sent, rel=0.02)
    # One gather before the forward, none for the backward, one reduction.
    assert ledger["inter_node"].keys() == {"forward", "reduce"}
    assert ledger["inter_node"]["forward"] == ledger["inter_node"]["reduce"]

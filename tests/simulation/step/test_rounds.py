"""Workers that step apart: their mean crosses once per round, waited for or meanwhile."""

from __future__ import annotations

import pytest

from simulation.prediction import needed
from tests.simulation.workloads import hardware, predicted, workload

#: All ranks of two nodes.
WORLD = 16
SLOW = hardware(1e9)


@pytest.mark.parametrize("strategy", ["local-sgd", "slowmo", "co2"])
@pytest.mark.parametrize("interval", [1, 12])
def test_a_step_sends_its_share_of_the_mean_in_fp32(strategy: str, interval: int) -> None:
    found = predicted(strategy, interval=interval, accumulation=3)
    ring = 2 * (WORLD - 1) / WORLD * 4 * workload(strategy).trained
    assert found.inter_node_bytes == pytest.approx(ring / interval)


def test_workers_of_a_node_exchange_what_they_are_sharded_in() -> None:
    found = predicted("co2", worker="node", interval=4)
    assert found.inter_node_bytes == pytest.approx(4 * workload("co2").trained / 4)
    assert found.moved_bytes["intra_node"]["forward"] > 0


def test_a_late_mean_is_hidden_if_a_round_takes_longer() -> None:
    free, slow = (predicted("co2", interval=480, on=on) for on in (hardware(1e12), SLOW))
    assert slow.step_seconds == pytest.approx(free.step_seconds, rel=1e-3)
    waited = predicted("local-sgd", interval=480, on=SLOW)
    share = waited.inter_node_bytes / SLOW.inter_bytes_per_s
    assert waited.step_seconds >= free.step_seconds + share


def test_a_late_mean_that_takes_longer_than_a_round_is_what_binds() -> None:
    found = predicted("co2", interval=1, on=SLOW)
    assert found.bottleneck == "inter_node"
    assert found.step_seconds == pytest.approx(
        found.inter_node_bytes / SLOW.inter_bytes_per_s, rel=0.05
    )


def test_the_outer_state_takes_three_copies_of_what_is_trained_where_it_lies() -> None:
    device = needed(workload("co2"), hardware())
    host = needed(workload("co2", outer_on="host"), hardware())
    held = 12 * workload("co2").trained
    assert device.device_bytes - host.device_bytes == pytest.approx(held)
    assert host.host_bytes - device.host_bytes == pytest.approx(8 * held)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"interval": 0}, "interval = 0"),
        ({"worker": "nodes"}, "worker = 'nodes'.*allowed are rank and node"),
        ({"outer_on": "disk"}, "outer_on = 'disk'.*allowed are device, host"),
    ],
)
def test_what_is_not_simulated_names_field_and_value(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        predicted("co2", **settings)

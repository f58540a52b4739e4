"""Bytes and seconds of a simulated step, by the rules of the schedules, for every strategy."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.registry import simulated
from experiments.records.cell import ClusterSpec
from experiments.records.modelled import framed
from simulation import framing
from simulation.prediction import chrome_trace, needed, predict
from simulation.traffic import MEASURED, difference_bits
from tests.experiments.cells import cell
from tests.simulation.workloads import hardware, predicted, workload


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("strategy", simulated())
def test_every_strategy_is_predicted(strategy: str, lora: bool) -> None:
    prediction = predicted(strategy, lora=lora, accumulation=2)
    # A step takes as long as its busiest resource at least, and no resource is over-used.
    assert 0 < max(prediction.busy.values()) <= 1 + 1e-9
    assert prediction.critical_path[-1]
    assert 0 < prediction.mfu <= prediction.hfu <= 0.5 + 1e-9  # the share of matrix products
    assert prediction.bottleneck in prediction.busy
    assert prediction.timeline.spans[prediction.timeline.critical_path[0]].start == 0


@pytest.mark.parametrize("strategy", simulated())
def test_one_node_sends_nothing_to_others(strategy: str) -> None:
    assert predicted(strategy, on=hardware(nodes=1)).inter_node_bytes == 0
    alone = cell(strategy, cluster=ClusterSpec(nodes=1, ranks_per_node=4))
    assert framing.messages(*framed(alone)) == 0


def test_exchanges_as_a_cell_chooses_them() -> None:
    """Two nodes of eight: a ring sends 15/16 of a buffer, a hierarchy 1/2."""
    ours, undeferred, flat = (
        predicted("fcdp", accumulation=3, exchanges=exchanges).moved_bytes["inter_node"]
        for exchanges in ("hierarchical", "undeferred", "flat")
    )
    assert undeferred["forward"] == ours["forward"]
    assert undeferred["reduce"] == pytest.approx(3 * ours["reduce"])
    assert flat["forward"] == pytest.approx(15 / 8 * undeferred["forward"])
    assert flat["reduce"] == pytest.approx(15 / 8 * undeferred["reduce"])
    assert "backward" not in flat
    assert predicted("fcdp-paper", accumulation=3).moved_bytes["inter_node"] == flat


@pytest.mark.parametrize("strategy", ["fcdp", "fcdp-offload"])
def test_sums_on_the_host_are_copied_out_after_each_micro_batch_but_the_last(strategy: str) -> None:
    slow = hardware(device_to_host_bytes_per_s=1e8)
    on_device, on_host = (
        predicted(strategy, on=slow, accumulation=3, partial_gradients=place)
        for place in ("device", "host")
    )
    trained = 4 * workload(strategy).trained
    assert on_host.footprint.host["gradient sums"] == trained
    longer = on_host.step_seconds - on_device.step_seconds
    assert longer == pytest.approx(2 * trained / 8 / 1e8, rel=0.2)


def test_sums_wait_where_the_library_would_put_them() -> None:
    """By its own rule: a tenth of what the shards leave free."""
    trained = 4 * workload("fcdp").trained
    shards = trained / 16  # in fp32, over sixteen ranks; sums are over eight
    for share, host_bytes, place in (
        (0.099, 512e9, "host"),
        (0.101, 512e9, "device"),
        (0.099, 0.99 * trained, "device"),  # which the host has no room for
    ):
        device = replace(hardware().device, memory_bytes=shards + trained / 8 / (2 * 0.1 - share))
        on = hardware(device=device, device_reserve_bytes=0.0, host_memory_bytes=host_bytes)
        needs = needed(workload("fcdp", accumulation=2, partial_gradients="auto"), on)
        assert ("gradient sums" in needs.host) == (place == "host")


def test_offloaded_states_cost_copies_and_the_cpu() -> None:
    device, host = predicted("fsdp2"), predicted("fsdp2-offload")
    assert host.busy["cpu"] > 0
    assert host.step_seconds > device.step_seconds
    assert "cpu" not in device.busy
    within = predicted("fsdp2-hsdp-offload", accumulation=2)
    whole = workload("fsdp2").parameters  # of which each node has all
    assert within.moved_bytes["host_to_device"]["forward"] == pytest.approx(2 * 4 * whole)
    assert within.moved_bytes["device_to_host"]["reduce"] == pytest.approx(4 * whole)
    # States of Adam and of the parameters in FP32 are read, and written again.
    moved = predicted("deepspeed-infinity").moved_bytes["disk"]["optimizer"]
    assert moved == pytest.approx(2 * 12 * workload("fsdp2").trained / 2)


def test_a_cache_beside_offloaded_shards_has_both_copied() -> None:
    """An entry does not have the rank's own shard."""
    plain, beside, anew = (
        predicted(strategy).moved_bytes["host_to_device"]["backward"]
        for strategy in ("fcdp", "fcdp-offload", "offload")
    )
    assert beside == pytest.approx(plain + anew)
    on_device = predicted("fcdp-offload", policy="device").moved_bytes["host_to_device"]
    assert on_device["backward"] == pytest.approx(anew)
    sent = predicted("fcdp-offload", lora=True).inter_node_bytes
    assert sent == predicted("fcdp", lora=True).inter_node_bytes


def test_host_memory_that_is_missing_is_said_and_the_step_predicted() -> None:
    small = hardware(nodes=4, host_memory_bytes=1e9)
    host = predict(workload("fcdp", large=True, micro_batch=1), small)
    assert host.state == "oom"
    assert "a node's host needs 14.8 GB, has 1.0" in host.error
    assert host.step_seconds > 0


SLOW = hardware(1e9)


@pytest.mark.parametrize("strategy", ["local-sgd", "slowmo", "co2", "diloco", "streaming-diloco"])
def test_a_mean_on_the_host_crosses_once_between_two_nodes_in_fp32(strategy: str) -> None:
    """By gloo, inside of the node first."""
    on_host = predicted(strategy, interval=12, outer_on="host")
    assert on_host.inter_node_bytes == pytest.approx(4 * workload(strategy).trained / 12)


def test_workers_of_a_node_exchange_what_they_are_sharded_in() -> None:
    prediction = predicted("co2", worker="node", interval=4)
    assert prediction.inter_node_bytes == pytest.approx(4 * workload("co2").trained / 4)
    assert prediction.moved_bytes["intra_node"]["forward"] > 0


def test_a_late_mean_is_hidden_if_a_round_takes_longer_and_binds_if_not() -> None:
    free, slow = (predicted("co2", interval=480, on=on) for on in (hardware(1e12), SLOW))
    assert slow.step_seconds == pytest.approx(free.step_seconds, rel=1e-3)
    waited = predicted("local-sgd", interval=480, on=SLOW)
    share = waited.inter_node_bytes / SLOW.inter_bytes_per_s
    assert waited.step_seconds >= free.step_seconds + share
    often = predicted("co2", interval=1, on=SLOW)
    sent_in = often.inter_node_bytes / SLOW.inter_bytes_per_s
    assert often.bottleneck == "inter_node"
    assert often.step_seconds == pytest.approx(sent_in, rel=0.05)


def test_fragments_cross_beside_their_share_of_the_steps() -> None:
    """Fragments in all steps are late; fragments in none would be waited for."""
    waited, late = (predicted(name, interval=6, on=SLOW) for name in ("diloco", "co2"))
    few, more, all_ = (
        predicted("streaming-diloco", interval=6, overlap=overlap, on=SLOW) for overlap in (1, 2, 3)
    )
    assert all_.step_seconds == pytest.approx(late.step_seconds, rel=1e-3)
    assert late.step_seconds < more.step_seconds < few.step_seconds < waited.step_seconds


def test_the_outer_state_takes_three_copies_of_what_is_trained_where_it_lies() -> None:
    device = needed(workload("co2"), hardware())
    host = needed(workload("co2", outer_on="host"), hardware())
    held = 12 * workload("co2").trained
    assert device.device_bytes - host.device_bytes == pytest.approx(held)
    assert host.host_bytes - device.host_bytes == pytest.approx(8 * held)


RATES = st.floats(1e-8, 1e-1)


def test_measured_points_are_met() -> None:
    for rate, bits in MEASURED:
        assert difference_bits(rate, 2) == pytest.approx(bits)
        assert difference_bits(rate, 4) == pytest.approx(bits + 16)


@given(RATES, RATES)
def test_larger_steps_send_more_bits_and_never_more_than_all(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 < difference_bits(low, 2) <= difference_bits(high, 2) <= 16


def test_a_link_without_limit_carries_no_differences_where_the_rule_decides() -> None:
    on = hardware().with_inter_bandwidth(float("inf"))
    whole, decided, always = (
        predicted("fcdp", gather_codec=codec, on=on).inter_node_bytes
        for codec in ("none", "delta", "delta(always)")
    )
    assert decided == whole > always


def test_a_trace_marks_the_critical_path() -> None:
    """tests/analysis/test_timeline.py reads the rest of it."""
    prediction = predicted("fcdp")
    events = [event for event in chrome_trace(prediction)["traceEvents"] if event["ph"] == "X"]
    critical = [event["name"] for event in events if event["cat"] == "critical"]
    assert sorted(critical) == sorted(prediction.critical_path)


#: Ranks that share the gradients to which others are added; on the host nobody counts them.
SHARERS = {"ddp": 1, "fsdp2": 16, "fcdp": 8, "fcdp-offload": 8, "fsdp2-offload": math.inf}


@pytest.mark.parametrize("strategy", SHARERS)
def test_gradients_of_each_further_micro_batch_are_read_added_and_written(strategy: str) -> None:
    """At the rate of bytes through memory; those of the first are what the others are added to."""
    alone, seconds = (
        [
            predicted(strategy, on=on, accumulation=count).timeline.busy_seconds()["compute"]
            for count in (1, 3)
        ]
        for on in (
            hardware(),
            replace(hardware(), rates=replace(hardware().rates, copied_bytes_per_s=1e9)),
        )
    )
    assert seconds[0] == pytest.approx(alone[0], rel=1e-9)
    more = 2 * 3 * 4 * workload(strategy).trained / SHARERS[strategy] / 1e9
    assert seconds[1] - alone[1] == pytest.approx(more, rel=2e-3, abs=1e-9)

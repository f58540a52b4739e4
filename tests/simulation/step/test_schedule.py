"""Bytes of a simulated step and their order: the schedules' rules, for every strategy."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.registry import simulated
from experiments.records.cell import ClusterSpec
from experiments.records.modelled import framed
from simulation import framing
from simulation.hardware import share_of_peak
from simulation.prediction import Prediction, chrome_trace, needed, predict
from simulation.traffic import MEASURED, difference_bits
from tests.experiments.cells import cell
from tests.simulation.workloads import hardware, predicted, workload


def spans(prediction: Prediction, start: str) -> dict[str, tuple[float, float]]:
    timeline = prediction.timeline
    return {
        task.name: (span.start, span.end)
        for task, span in zip(timeline.tasks, timeline.spans, strict=True)
        if task.name.startswith(start)
    }


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


def test_a_threshold_divides_between_device_and_host() -> None:
    """The device holds nothing at 0, all at 1, and in between what comes first in forward."""
    on = hardware()
    copied = [
        predict(workload("fcdp", large=True, micro_batch=4, policy=f"threshold({tau})"), on)
        .moved_bytes.get("host_to_device", {})
        .get("backward", 0.0)
        for tau in (0.0, 0.5, 1.0)
    ]
    assert copied[0] > copied[1] > copied[2] == 0


def test_a_budget_is_not_exceeded() -> None:
    prediction = predicted("fcdp", policy="budget(device=1 MiB, host=1 MiB)")
    assert 0 < prediction.footprint.device["cache"] <= 2**20
    assert 0 < prediction.footprint.host["cache"] <= 8 * 2**20
    assert prediction.moved_bytes["inter_node"]["backward"] > 0


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3", "fcdp", "fsdp2-hsdp", "mics"])
def test_no_more_than_two_blocks_are_gathered(strategy: str) -> None:
    """The gather of a block begins after the computation before the one that runs."""
    prediction = predicted(strategy, on=hardware(1e13))
    computed = list(spans(prediction, "forward block").values())
    gathers = spans(prediction, "forward gather block")
    for index in range(2, len(computed)):
        start, _ = gathers[f"forward gather block {index}"]
        assert start >= computed[index - 2][1] - 1e-12
    # With a fast link the next one is gathered while a block computes.
    assert gathers["forward gather block 3"][1] < computed[2][1]


def test_computation_waits_for_the_reduction_before_the_last() -> None:
    prediction = predicted("fsdp2", on=hardware(1e8))
    reduced = spans(prediction, "reduce block")
    computed = spans(prediction, "backward block")
    for index in range(2, 6):
        assert computed[f"backward block {index - 2}"][0] >= reduced[f"reduce block {index}"][1]


def test_the_first_copy_in_of_backward_waits_for_its_store() -> None:
    prediction = predicted("fcdp", on=hardware(1e13, device_to_host_bytes_per_s=1e6))
    stored = spans(prediction, "forward store block 5")["forward store block 5"]
    copied = spans(prediction, "backward gather block 5 copy in")["backward gather block 5 copy in"]
    assert copied[0] >= stored[1]


def test_recomputation_costs_a_forward() -> None:
    rates = share_of_peak(hardware().device, 1e-4)
    slow = hardware(1e15, rates=rates)  # nothing but computation counts
    saved, recomputed = (
        predicted("fcdp", on=slow, recomputed=share).step_seconds for share in (0.0, 1.0)
    )
    assert recomputed / saved == pytest.approx(4 / 3, rel=0.01)


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
    with pytest.raises(ValueError, match="exchanges = 'ring': allowed are hierarchical, undeferr"):
        workload("fcdp", exchanges="ring")


@pytest.mark.parametrize("strategy", ["fcdp", "fcdp-offload"])
def test_sums_on_the_host_are_copied_in_and_out_with_each_micro_batch(strategy: str) -> None:
    """The first has nothing to copy in, and the last leaves nothing."""
    on_device, on_host = (
        predicted(strategy, accumulation=3, partial_gradients=place) for place in ("device", "host")
    )
    trained = 4 * workload(strategy).trained
    assert on_host.footprint.host["gradient sums"] == trained
    assert "gradient sums" not in on_device.footprint.host
    for link in ("host_to_device", "device_to_host"):
        before, after = (one.moved_bytes[link].get("reduce", 0.0) for one in (on_device, on_host))
        assert after - before == pytest.approx(2 * trained)
    assert on_host.moved_bytes["inter_node"] == on_device.moved_bytes["inter_node"]
    assert on_host.moved_bytes["intra_node"] == on_device.moved_bytes["intra_node"]
    saved = on_device.footprint.device_bytes - on_host.footprint.device_bytes
    assert 0 < saved < trained / 8
    slow = hardware(device_to_host_bytes_per_s=1e8)
    times = [
        predicted(strategy, on=slow, accumulation=3, partial_gradients=place).step_seconds
        for place in ("device", "host")
    ]
    assert times[1] - times[0] == pytest.approx(2 * trained / 8 / 1e8, rel=0.2)


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


def test_the_network_slows_copies_on_a_shared_pcie_link() -> None:
    slow = hardware(100e9, host_to_device_bytes_per_s=2e9, device_to_host_bytes_per_s=2e9)
    apart, shared = (
        predicted("fcdp", on=replace(slow, nic_shares_pcie=shares, intra_shares_pcie=shares))
        for shares in (False, True)
    )
    assert shared.step_seconds > apart.step_seconds


def test_offloaded_states_cost_copies_and_the_cpu() -> None:
    device, host = predicted("fsdp2"), predicted("fsdp2-offload")
    assert host.inter_node_bytes == device.inter_node_bytes
    assert host.busy["cpu"] > 0
    assert host.step_seconds > device.step_seconds
    assert "cpu" not in device.busy
    within = predicted("fsdp2-hsdp-offload", accumulation=2)
    assert within.inter_node_bytes == predicted("fsdp2-hsdp", accumulation=2).inter_node_bytes
    whole = workload("fsdp2").parameters  # of which each node has all
    assert within.moved_bytes["host_to_device"]["forward"] == pytest.approx(2 * 4 * whole)
    assert within.moved_bytes["device_to_host"]["reduce"] == pytest.approx(4 * whole)
    disk = predicted("deepspeed-infinity")
    assert disk.moved_bytes["disk"]["optimizer"] == pytest.approx(
        2 * 12 * workload("fsdp2").trained / 2
    )


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


def test_what_does_not_fit_says_what_is_missing_and_fp32_on_gpus_is_refused() -> None:
    prediction = predict(workload("ddp", large=True), hardware())
    assert prediction.state == "oom"
    assert "a device needs" in prediction.error
    assert prediction.step_seconds > 0
    small = hardware(nodes=4, host_memory_bytes=1e9)
    host = predict(workload("fcdp", large=True, micro_batch=1), small)
    assert "a node's host needs 14.8 GB, has 1.0" in host.error
    with pytest.raises(ValueError, match="dtype = 'float32': .* allowed: bfloat16"):
        predict(replace(workload("fcdp"), element_bytes=4), hardware())


#: All ranks of two nodes.
WORLD = 16
SLOW = hardware(1e9)


@pytest.mark.parametrize("strategy", ["local-sgd", "slowmo", "co2", "diloco", "streaming-diloco"])
@pytest.mark.parametrize("interval", [1, 12])
def test_a_step_sends_its_share_of_the_mean_in_fp32(strategy: str, interval: int) -> None:
    prediction = predicted(strategy, interval=interval, accumulation=3)
    ring = 2 * (WORLD - 1) / WORLD * 4 * workload(strategy).trained
    assert prediction.inter_node_bytes == pytest.approx(ring / interval)
    # By gloo, inside of the node first: between two nodes it crosses once.
    on_host = predicted(strategy, interval=interval, outer_on="host")
    assert on_host.inter_node_bytes == pytest.approx(4 * workload(strategy).trained / interval)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "interval = 0"),
        ({"worker": "nodes"}, "worker = 'nodes'.*allowed are rank and node"),
        ({"outer_on": "disk"}, "outer_on = 'disk'.*allowed are device, host"),
    ],
)
def test_what_is_not_simulated_names_field_and_value(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        predicted("co2", **settings)


RATES = st.floats(1e-8, 1e-1)


@pytest.mark.parametrize(("rate", "bits"), MEASURED)
def test_measured_points_are_met(rate: float, bits: float) -> None:
    assert difference_bits(rate, 2) == pytest.approx(bits)
    assert difference_bits(rate, 4) == pytest.approx(bits + 16)


@given(RATES, RATES)
def test_larger_steps_send_more_bits_and_never_more_than_all(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 < difference_bits(low, 2) <= difference_bits(high, 2) <= 16
    with pytest.raises(ValueError, match="learning_rate = 0: must be more than 0"):
        difference_bits(0, 2)


def test_a_link_without_limit_carries_no_differences_where_the_rule_decides() -> None:
    on = hardware().with_inter_bandwidth(float("inf"))
    whole, decided, always = (
        predicted("fcdp", gather_codec=codec, on=on).inter_node_bytes
        for codec in ("none", "delta", "delta(always)")
    )
    assert decided == whole > always


def test_every_task_is_an_event_on_its_streams_row() -> None:
    prediction = predicted("fcdp")
    trace = json.loads(json.dumps(chrome_trace(prediction)))
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(prediction.timeline.tasks)
    assert {"compute", "gather", "reduce", "copy in", "copy out"} <= set(rows.values())
    for event, task in zip(events, prediction.timeline.tasks, strict=True):
        assert (event["name"], rows[event["tid"]]) == (task.name, task.stream)
    ends = [event["ts"] + event["dur"] for event in events]
    assert max(ends) == pytest.approx(1e6 * prediction.step_seconds)
    critical = [event["name"] for event in events if event["cat"] == "critical"]
    assert sorted(critical) == sorted(prediction.critical_path)

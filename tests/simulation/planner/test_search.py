"""The grid: what fits, how steps of many micro-batches are counted, and what can never be."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulation.planner.request import RECOMPUTED, planned
from simulation.planner.search import (
    _divisors,
    _known_busy,
    _leanest,
    _Steps,
    _undominated,
    most_per_s,
    most_tokens_per_s,
    search,
    shortfalls,
    simulated,
)
from simulation.prediction import build, fits, needed, predict
from simulation.workload import Workload
from tests.simulation.planner.made_up import KINDS, config_file, rented, request
from tests.simulation.workloads import paper_cluster

STRATEGIES = sorted(planned())
SLOW = settings(max_examples=15)
TUNING = st.sampled_from([None, 8])


def workload(strategy: str, lora_rank: int | None = None, layers: int = 6) -> Workload:
    point = request("gpt-10b", strategies=(strategy,), lora_rank=lora_rank).workloads()[0]
    return replace(point, model=replace(point.model, layers=layers), micro_batch=4)


# CO2's mean arrives beside the whole step: slower than three micro-batches, faster than four.
@example("co2", None, 4, 10)
@SLOW
@given(st.sampled_from(STRATEGIES), TUNING, st.integers(4, 12), st.sampled_from([1, 10, 100]))
def test_many_micro_batches_take_what_the_simulator_says(
    strategy: str, lora_rank: int | None, count: int, gbit_s: int
) -> None:
    hardware = paper_cluster(4, gbit_s * 1e9)
    point = replace(workload(strategy, lora_rank), accumulation=count)
    option, whole = simulated(point, hardware), predict(point, hardware)
    assert option.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    assert option.inter_node_bytes == pytest.approx(whole.inter_node_bytes, rel=1e-6)
    assert option.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-3)
    assert (option.mfu, option.hfu) == pytest.approx((whole.mfu, whole.hfu), rel=1e-3)
    for name, share in whole.busy.items():
        assert option.busy_seconds[name] == pytest.approx(share * whole.step_seconds, rel=1e-3)


@SLOW
@given(st.sampled_from(STRATEGIES), TUNING, st.sampled_from([0.0, 0.5, 1.0]))
def test_the_critical_path_is_the_step_and_no_step_beats_computation(
    strategy: str, lora_rank: int | None, recomputed: float
) -> None:
    point = replace(workload(strategy, lora_rank), recomputed=recomputed)
    hardware = paper_cluster()
    speed = simulated(point, hardware)
    assert sum(speed.waits_seconds.values()) == pytest.approx(speed.step_seconds)
    assert speed.tokens_per_s <= most_tokens_per_s(build(point, hardware)) * (1 + 1e-9)


@SLOW
@given(
    *(st.sampled_from(KINDS), TUNING, st.integers(1, 12)),
    *(st.floats(0.1, 400), st.floats(1, 20), st.sampled_from([2, 4])),
)
def test_neither_more_bandwidth_nor_a_larger_micro_batch_lowers_throughput(
    strategy: str, lora_rank: int | None, micro_batch: int, gbit_s: float, times: float, nodes: int
) -> None:
    point = replace(workload(strategy, lora_rank), micro_batch=micro_batch)
    slow, fast = (paper_cluster(nodes, factor * gbit_s * 1e9) for factor in (1, times))
    least = simulated(point, slow).tokens_per_s * (1 - 1e-9)
    assert simulated(point, fast).tokens_per_s >= least
    larger = replace(point, micro_batch=micro_batch + 1)
    assert simulated(larger, slow).tokens_per_s >= least


def test_the_largest_batch_is_the_last_that_fits() -> None:
    asked = request("gpt-10b", strategies=("fsdp2", "fcdp", "ddp"))
    fsdp2, fcdp, ddp = search(asked)
    for verdict in (fsdp2, fcdp):
        assert verdict.shortfall.fits
        most = max(option.workload.micro_batch for option in verdict.options)
        assert verdict.largest_micro_batch == most
        for option in verdict.options:
            more = replace(option.workload, micro_batch=option.workload.micro_batch + 1)
            assert fits(option.workload, asked.hardware)
            assert not fits(more, asked.hardware)
    assert (ddp.best, ddp.options, ddp.largest_micro_batch) == (None, (), 0)
    assert ddp.shortfall.device_bytes > 0


def test_a_global_batch_is_reached_by_accumulation() -> None:
    asked = request("gpt-10b", strategies=("fsdp2", "fcdp"), global_batch=32 * 24)
    for verdict in search(asked):
        assert verdict.options
        for option in verdict.options:
            point = option.workload
            assert point.micro_batch * point.accumulation == 24
    huge = request("gpt-10b", strategies=("fsdp2",), recomputed=(1.0,), global_batch=32 * 10**12)
    (verdict,) = search(huge)
    assert verdict.best.workload.micro_batch * verdict.best.workload.accumulation == 10**12


@given(st.integers(1, 5000))
def test_micro_batches_are_all_that_divide_the_sequences(whole: int) -> None:
    assert sorted(_divisors(whole)) == [n for n in range(1, whole + 1) if whole % n == 0]


def test_named_micro_batches_are_all_tried_and_no_other() -> None:
    asked = request("gpt-10b", strategies=("fsdp2",), recomputed=(1.0,), micro_batches=(1, 8, 5000))
    (verdict,) = search(asked)
    assert [option.workload.micro_batch for option in verdict.options] == [8, 1]
    assert verdict.largest_micro_batch == 8
    (beaten,) = search(asked, least=2 * verdict.best.tokens_per_s)
    assert not beaten.options


@pytest.mark.parametrize("gbit_s", [0.1, 10_000])
def test_what_cannot_be_faster_is_not_simulated(tmp_path: Path, gbit_s: float) -> None:
    grid = {"strategies": ("fsdp2",), "recomputed": (0.0, 0.5, 1.0), "global_batch": 32}
    (verdict,) = search(request(str(config_file(tmp_path)), gbit_s=gbit_s, **grid))
    assert [option.workload.recomputed for option in verdict.options] == [0.0]


def test_of_the_same_micro_batches_those_are_tried_that_compute_least() -> None:
    """Half of the blocks may take less than the selected part of all; sums on the host never."""
    asked = request(strategies=("fcdp",), recomputed=RECOMPUTED, global_batch=64)
    points = [replace(point, accumulation=2) for point in asked.workloads()]
    assert {point.partial_gradients for point in points} == {"device", "host"}
    assert _undominated(points, asked.hardware) == points[:1]
    again = [point for point in points if point.recomputed]
    seconds = {point: 1 / most_per_s(point, asked.hardware) for point in again}
    assert min(seconds, key=lambda point: seconds[point]) in _undominated(again, asked.hardware)
    larger = [replace(point, micro_batch=1 + at) for at, point in enumerate(points)]
    assert _undominated(larger, asked.hardware) == larger


@pytest.mark.parametrize("lora_rank", [None, 16])
def test_what_a_search_knows_of_a_point_holds_for_those_that_it_stands_for(
    lora_rank: int | None,
) -> None:
    """Those that differ by recomputation, kernels, states and the micro-batch's size."""
    kinds = (*KINDS, "co2", "streaming-diloco", "deepspeed-infinity")
    asked = request("gpt-10b", hardware=rented("a100-80gb"), strategies=kinds, lora_rank=lora_rank)

    def busy(*points: Workload) -> Mapping[str, float]:
        """Busy seconds of the last point, by a search that was asked for all of them."""
        _known_busy.cache_clear()
        steps = _Steps(asked.hardware)
        return [steps._busy(point) for point in points][-1]

    for point in asked.workloads():
        other = point.changed(recomputed=1.0, kernels="fused", states="int8", micro_batch=4)
        assert busy(point, other) == pytest.approx(busy(other), rel=1e-9)


@pytest.mark.parametrize("lora_rank", [None, 16])
@pytest.mark.parametrize("model", ["gpt-10b", "mixtral-8x7b"])
def test_what_is_not_asked_for_takes_no_less_memory(model: str, lora_rank: int | None) -> None:
    """Points that recompute less than all, and points of larger micro-batches."""
    kinds = (*KINDS, "fcdp-offload", "deepspeed-hpz", "pipeline")
    asked = request(model, strategies=kinds, lora_rank=lora_rank, recomputed=RECOMPUTED)

    def memory(point: Workload, size: int) -> tuple[float, float]:
        needs = needed(point.changed(micro_batch=size, accumulation=8 // size), asked.hardware)
        return needs.device_bytes, needs.host_bytes

    families: dict[Workload, list[Workload]] = {}
    for point in asked.workloads():
        alike = point.changed(recomputed=0.0, checkpointing="full")
        families.setdefault(alike, []).append(point)
    for family in families.values():
        leanest = _leanest(family, asked.hardware) or family[0]
        assert leanest.recomputed or len(family) == 1  # zero bubble recomputes nothing
        for point, size in product(family, (1, 2, 4)):
            least, own = memory(leanest, size), memory(point, size)
            larger = memory(point, 2 * size) if size < 4 else own
            assert all(map(operator.le, least, own))
            assert all(map(operator.le, own, larger))


def test_a_policy_that_goes_by_the_memory_in_use_is_asked_for_every_point() -> None:
    """With all blocks recomputed it keeps more on the devices, and nothing fits."""
    on = replace(rented("a40", nodes=2, ranks=2), host_memory_bytes=2e12)
    grid = {"strategies": ("fcdp",), "policies": ("threshold(0.8)",), "recomputed": RECOMPUTED}
    batch = {"sequence_lengths": (512,), "global_batch": 32, "kernels": "fused"}
    (verdict,) = search(request("llama-3-8b", hardware=on, **grid, **batch))
    chosen = verdict.best.workload
    assert (chosen.micro_batch, chosen.checkpointing) == (8, "selective")


def test_a_stage_of_one_block_needs_it_whole_in_backward_recomputed_or_not() -> None:
    asked = request("gpt-10b", strategies=("pipeline", "fsdp2"))
    for point in asked.workloads():
        stages = 4 // point.nodes_per_stage * point.stages_per_node if point.schedule.cut else 1
        for blocks, found in ((2 * stages, 1.0), (2 * stages - 1, None)):
            model = replace(point.model, layers=blocks)
            family = [replace(point, model=model, recomputed=share) for share in (0.0, 0.5, 1.0)]
            leanest = _leanest(family, asked.hardware)
            assert (leanest and leanest.recomputed) == found
            assert _leanest(family[:2], asked.hardware) is None


def test_shortfalls_are_of_every_point() -> None:
    asked = request(strategies=("fcdp", "ddp"), policies=("host", "disk"))
    lacks = [*shortfalls(asked)]
    assert [strategy for strategy, _ in lacks] == 4 * ["fcdp"] + 2 * ["ddp"]
    assert {strategy for strategy, lack in lacks if not lack.fits} == {"ddp"}


@pytest.mark.parametrize("gbit_s", [0.3, 10, 400])
@pytest.mark.parametrize("strategy", ["fsdp2", "hpz", "fcdp", "pipeline", "deepspeed-offload"])
def test_what_is_taken_is_what_all_of_the_grid_would_say(strategy: str, gbit_s: float) -> None:
    """No bound leaves out what would be taken: every point that fits is simulated beside."""
    asked = request(
        "gpt-10b", gbit_s=gbit_s, strategies=(strategy,), recomputed=RECOMPUTED, global_batch=256
    )
    for verdict in search(asked):
        points = [
            replace(point, micro_batch=size, accumulation=8 // size)
            for point in asked.workloads()
            if (point.within_stage == "fcdp") == verdict.fcdp_inside
            for size in (8, 4, 2, 1)
            if point.partial_gradients == "device" or size < 8
        ]
        fitting = [point for point in points if fits(point, asked.hardware)]
        if strategy != "pipeline":  # the largest micro-batch of each
            alike = {
                replace(point, micro_batch=1, accumulation=1): point for point in fitting[::-1]
            }
            fitting = [point for point in fitting if point in alike.values()]
        options = [simulated(point, asked.hardware) for point in fitting]
        most = max(option.tokens_per_s for option in options)
        assert verdict.best.tokens_per_s >= 0.99 * most * (1 - 1e-9)
        if strategy != "pipeline":
            first = next(option for option in options if option.as_fast(most))
            assert verdict.best.workload == first.workload

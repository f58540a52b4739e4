"""GPUs, clusters, networks: the one table, and the memory that cards really have."""

from dataclasses import replace
from functools import partial

import pytest

from simulation import hardware
from simulation.compute import ROWS, rates_of, read_rows, run_of, with_rates
from simulation.hardware import (
    CARDS,
    FABRICS,
    card,
    cluster,
    described,
    gpu,
    gpu_of,
    reported,
    share_of_peak,
)
from simulation.planner.plan import plan
from simulation.planner.rent import Instance
from simulation.planner.request import Request
from simulation.prediction import needed, predict
from tests.experiments.golden import tables
from tests.simulation.planner.made_up import rented
from tests.simulation.workloads import workload

#: GPUs by the names that drivers and people have for them.
NAMES = tables(__file__)
NEW = CARDS["h100-sxm"].model_copy(
    update={"name": "x100", "tflops": 2000, "reported_mib": 90_000, "driver": r"X100$"}
)


def test_ranks_that_share_a_device_share_its_rate() -> None:
    alone, shared = (share_of_peak(gpu("a40"), 0.5, ranks) for ranks in (1, 4))
    assert shared.flops_per_s == alone.flops_per_s / 4
    assert shared.copied_bytes_per_s == alone.copied_bytes_per_s / 4


@pytest.mark.parametrize(("model", "name"), NAMES["driver"].items())
def test_gpus_are_known_by_what_the_driver_calls_them(model: str, name: str | None) -> None:
    assert gpu_of(model) == (name and gpu(name))


def test_a_row_is_all_that_a_new_gpu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hardware.CARDS, "x100", NEW)
    assert gpu_of("NVIDIA X100") == NEW.gpu
    rates = rates_of(NEW.gpu)
    assert (rates.basis, rates.measured_on) == ("nearest architecture", "h100-sxm")
    rented = Instance(provider="p", instance="x", gpu="x100", gpus=8, nic_gbit_s=400).cluster(2)
    assert rented.device.memory_bytes == 90_000 * 2**20
    made = plan(Request(model="gpt-10b", hardware=rented, strategies=("fsdp2",)))
    assert made.strategy == "fsdp2"


def test_a_gpu_of_ones_own_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CARDS", dict(hardware.CARDS))
    name = described("mine:tflops=312,gb=80,gb_s=2039,nvlink_gb_s=300,like=a100-80gb")
    own, known = (
        plan(Request(model="llama-3-8b", hardware=rented(gpu, gbit_s=100), strategies=("fsdp2",)))
        for gpu in (name, "a100-80gb")
    )
    assert own.option.tokens_per_s == pytest.approx(known.option.tokens_per_s, rel=0.05)
    assert described("H100") == "h100-sxm"


def test_without_a_row_nothing_stands_in_for_it() -> None:
    known = cluster("a40", nodes=1, ranks_per_node=1, inter_bits_per_s=1e9)
    unknown = replace(known, device=NEW.gpu)
    for ask in (reported, with_rates):
        with pytest.raises(ValueError, match="gpu = 'x100': allowed are a40, a100-40gb"):
            ask(unknown)


def test_every_run_that_ran_fits() -> None:
    lacking = []
    for row in (*read_rows(), *read_rows(ROWS.with_name("held-out.csv"))):
        run = run_of(row)
        hardware = reported(run.hardware)
        if (shortage := needed(run.workload, hardware).shortage(hardware)) is not None:
            lacking.append((row, shortage))
    assert not lacking


@pytest.mark.parametrize("name", CARDS)
def test_cards_have_what_they_report_less_what_cuda_takes(name: str) -> None:
    nominal = cluster(name, nodes=1, ranks_per_node=1, inter_bits_per_s=1e9)
    actual = reported(nominal)
    assert 0.95 < actual.device.memory_bytes / nominal.device.memory_bytes < 1.08
    assert 0.82 < actual.usable_device_bytes / actual.device.memory_bytes < 0.95
    if name == "h100-sxm":
        assert actual.device.memory_bytes == pytest.approx(85.5e9, rel=1e-3)


HARDWARE = cluster("a100-80gb", nodes=4, ranks_per_node=8, inter_bits_per_s=1e10)
large = partial(workload, large=True, micro_batch=1)


def test_kernels_keep_less_the_more_they_fuse() -> None:
    run = run_of(read_rows()[0])
    for checkpointing, recomputed in (("full", 0.0), ("selective", 1.0), ("full", 1.0)):
        point = replace(run.workload, checkpointing=checkpointing, recomputed=recomputed)
        eager, flash, fused = (
            needed(replace(point, kernels=kernels), run.hardware).device_bytes
            for kernels in ("eager", "flash", "fused")
        )
        assert eager > flash > fused


@pytest.mark.parametrize("strategy", ["fsdp2", "fcdp", "fsdp2-hsdp", "ddp", "deepspeed-zero3"])
def test_reductions_in_fp32_send_twice_as_much(strategy: str) -> None:
    points = (large(strategy, reduce_dtype=dtype) for dtype in ("same", "fp32"))
    sent = [predict(point, HARDWARE).moved_bytes["inter_node"] for point in points]
    assert sent[1]["reduce"] == pytest.approx(2 * sent[0]["reduce"])
    assert sent[1].get("forward") == sent[0].get("forward")


def test_fabrics_differ_in_latency_and_oversubscription_in_bandwidth() -> None:
    seconds = {
        fabric: predict(large("fcdp"), HARDWARE.over(fabric, 1)).step_seconds
        for fabric in ("infiniband", "roce", "tcp")
    }
    assert seconds["infiniband"] < seconds["roce"] < seconds["tcp"]
    shared = HARDWARE.over("tcp", 4)
    assert shared.inter_bytes_per_s == HARDWARE.inter_bytes_per_s / 4
    assert predict(large("fcdp"), shared).step_seconds > 3 * seconds["tcp"]


def test_fabrics_differ_in_the_share_that_they_reach() -> None:
    nominal = replace(HARDWARE, inter_bytes_per_s=hardware.LINK_EFFICIENCY * 80e9 / 8)
    reached = {fabric: 8 * nominal.over(fabric, 1).inter_bytes_per_s for fabric in FABRICS}
    assert reached == pytest.approx(
        {"tcp": 25e9, "roce": 68e9, "infiniband": 72e9, "efa": 56e9, "unknown": 64e9}
    )
    slow = replace(nominal, inter_bytes_per_s=hardware.LINK_EFFICIENCY * 1e9)
    assert slow.over("tcp", 1) == replace(slow, inter_latency_seconds=50e-6)


@pytest.mark.parametrize("strategy", ["fsdp2", "fcdp", "ddp", "deepspeed-zero3", "fsdp2-offload"])
def test_states_in_fewer_bits_take_less_memory_and_time(strategy: str) -> None:
    points = [large(strategy, states=states) for states in ("fp32", "bf16", "int8")]
    places = [{**of.device, **of.host} for of in (needed(one, HARDWARE) for one in points)]
    sums = [sum(place.values()) for place in places]
    assert sums == sorted(sums, reverse=True)
    assert predict(points[2], HARDWARE).step_seconds <= predict(points[0], HARDWARE).step_seconds
    states = [place["optimizer states"] for place in places]
    assert states[0] > states[1] == 2 * states[2]


@pytest.mark.parametrize(("typed", "name"), NAMES["typed"].items())
def test_gpus_by_the_names_that_people_type(typed: str, name: str) -> None:
    assert card(typed).name == name
    made = cluster(typed, nodes=2, ranks_per_node=8, inter_bits_per_s=1e9)
    assert (made.device.name, made.name) == (name, f"2x8-{name}")

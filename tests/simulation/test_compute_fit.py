"""Rates of computation: constants are found again, published runs predicted, all GPUs have some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulation import compute
from simulation.compute import (
    ROWS,
    Fitted,
    Row,
    Run,
    Shares,
    fit,
    rates_of,
    read_rows,
    run_of,
    with_rates,
)
from simulation.hardware import CARDS, Rates, cluster, gpu, scale
from simulation.planner.search import simulated, tokens_range
from tests.simulation.workloads import workload

RUNS = [run_of(row) for row in read_rows() if row.bf16]
RECORD = compute.read()
TRUE = Fitted(
    {gpu: Shares(0.8, 0.3, 0.5) for gpu in {run.row.gpu for run in RUNS}},
    exchange_passes=9.0,
    lost_with_scale=0.05,
)


def made(run: Run) -> Run:
    """The run as it would be on GPUs of the rates ``TRUE``."""
    speed = compute.tokens_per_gpu_s(run, TRUE)
    return replace(run, row=run.row.model_copy(update={"tokens_per_s_per_gpu": speed}))


def test_constants_are_found_again() -> None:
    found = fit([made(run) for run in RUNS]).numbers()
    for name, value in TRUE.numbers().items():
        tolerance = 0.25 if name in ("exchange passes", "lost with scale") else 0.1
        assert found[name] == pytest.approx(value, rel=tolerance), name


def test_the_record_is_of_the_committed_rows_and_of_this_code() -> None:
    rows = [row for row in read_rows() if row.bf16]
    assert [one.row for one in RECORD.predictions] == rows
    again = fit(RUNS).numbers()
    for constant in RECORD.constants:
        assert constant.value == pytest.approx(again[constant.name], rel=1e-3)
        assert constant.low <= constant.value <= constant.high
    for one, run in list(zip(RECORD.predictions, RUNS, strict=True))[::9]:
        assert compute.tokens_per_gpu_s(run, RECORD.fitted()) == pytest.approx(one.fitted, rel=1e-3)


@pytest.mark.parametrize("what", ["the other half of the sizes", "each size", "each length"])
def test_rows_that_the_fit_has_not_seen_are_predicted(what: str) -> None:
    check = RECORD.check(what)
    assert check.rows == len(RUNS)
    assert check.median <= 0.07
    assert check.nine_of_ten <= 0.15


def test_both_halves_are_held_out() -> None:
    sizes = {run.row.model for run in RUNS}
    assert sizes - compute.HALF
    assert sizes & compute.HALF == compute.HALF
    seen = fit([run for run in RUNS if run.row.model in compute.HALF])
    for one, run in zip(RECORD.predictions, RUNS, strict=True):
        if run.row.model not in compute.HALF:
            assert one.held_out == pytest.approx(compute.tokens_per_gpu_s(run, seen), rel=1e-3)


def test_given_rows_are_checked_by_committed_constants() -> None:
    found = compute.errors(read_rows(), RECORD.fitted())
    assert found.median == pytest.approx(RECORD.check("all rows, fitted").median, abs=1e-3)
    with pytest.raises(ValueError, match="rows: hold none in bf16"):
        compute.errors([row for row in read_rows() if not row.bf16], RECORD.fitted())


def test_a_mistake_in_a_row_names_its_line(tmp_path: Path) -> None:
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([*lines[:2], lines[2].replace("256,2048", "0,2048")]) + "\n")
    with pytest.raises(ValueError, match=r"rows\.csv:3: gpus: "):
        read_rows(file)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: 3 were given, 5 constants need as many"):
        fit(RUNS[:3])


def test_gpus_fill_nodes() -> None:
    row: Row = RUNS[0].row.model_copy(update={"gpus": 12})
    with pytest.raises(ValueError, match="gpus = 12: must be a multiple of 8"):
        run_of(row)


MEASURED = ("a100-40gb", "a100-80gb", "h100-sxm")


@pytest.mark.parametrize("name", CARDS)
def test_rates_say_what_they_rest_on(name: str) -> None:
    rates = rates_of(gpu(name))
    assert rates.lowest < 1 < rates.highest
    if name in MEASURED:
        assert (rates.basis, rates.measured_on) == ("fitted", name)
        return
    assert rates.basis == "nearest architecture"
    assert rates.measured_on in MEASURED
    narrow = rates_of(gpu(rates.measured_on))
    assert rates.lowest < narrow.lowest
    assert rates.highest > narrow.highest


def test_measured_products_take_the_place_of_the_share() -> None:
    rates = rates_of(gpu("a100-80gb"))
    faster = rates.with_products(1.2 * rates.products_per_s)
    assert faster.basis == "preflight"
    assert faster.attention_per_s == pytest.approx(1.2 * rates.attention_per_s)
    assert faster.bytes_per_s == rates.bytes_per_s


def test_scale_is_linear_first_and_then_logarithmic() -> None:
    assert scale(1) == 0
    assert scale(3) == pytest.approx(2 * scale(2), rel=0.05)
    assert scale(1024) < 4 * scale(64)
    rates = Rates(products_per_s=1.0, attention_per_s=1.0, bytes_per_s=1.0, lost_with_scale=0.1)
    assert rates.slower(1) == 1
    assert rates.slower(33) == pytest.approx(1 / 0.9)


@pytest.mark.parametrize("gbit_s", [1, 1000])
def test_a_range_holds_the_prediction_and_the_steps_at_its_ends(gbit_s: float) -> None:
    hardware = with_rates(
        cluster("a100-80gb", nodes=4, ranks_per_node=8, inter_bits_per_s=gbit_s * 1e9)
    )
    rates = hardware.rates
    assert rates is not None
    speed = simulated(workload("fsdp2"), hardware).speed
    low, high = tokens_range(speed, hardware)
    assert low < speed.tokens_per_s < high
    for times in (rates.lowest, rates.highest):
        other = replace(
            rates,
            products_per_s=times * rates.products_per_s,
            attention_per_s=times * rates.attention_per_s,
            bytes_per_s=times * rates.bytes_per_s,
            exchanged_bytes_per_s=times * rates.exchanged_bytes_per_s,
        )
        found = simulated(workload("fsdp2"), replace(hardware, rates=other))
        assert low <= found.tokens_per_s <= high


def test_kernels_cost_what_they_write() -> None:
    hardware = with_rates(cluster("h100-sxm", nodes=1, ranks_per_node=8, inter_bits_per_s=1e12))
    speeds = [
        simulated(replace(workload("fsdp2"), kernels=kernels), hardware).tokens_per_s
        for kernels in ("eager", "flash", "fused")
    ]
    assert speeds == sorted(speeds)

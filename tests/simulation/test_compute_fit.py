"""Rates of computation: known constants are recovered, published runs predicted, for all GPUs."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from simulation import calibration, compute
from simulation.calibration import fit, spread
from simulation.compute import ROWS, SOURCES, Fitted, Run, rates_of, read_rows, run_of, with_rates
from simulation.hardware import CARDS, cluster, gpu
from simulation.planner.request import Request
from simulation.planner.search import simulated, tokens_range
from tests.simulation.workloads import workload

RUNS = [run_of(row) for row in read_rows() if row.bf16]
RECORD = compute.read()
VALUES = {"products": 0.8, "attention": 0.5, "bytes": 0.6}
TRUE = {name: VALUES.get(name.split()[-1], value) for name, value in RECORD.fitted().items()}


def made(run: Run) -> Run:
    """The run as it would be on GPUs of the rates ``TRUE``."""
    speed = calibration.tokens_per_gpu_s(run, TRUE)
    return replace(run, row=run.row.model_copy(update={"tokens_per_s_per_gpu": speed}))


def ratio(run: Run, by: Fitted) -> float:
    return run.row.tokens_per_s_per_gpu / calibration.tokens_per_gpu_s(run, by)


def test_constants_are_recovered() -> None:
    fitted = fit([made(run) for run in RUNS])
    for name, value in TRUE.items():
        tolerance = {"exchange passes": 0.4, "lost with scale": 0.25}.get(name, 0.1)
        if name.split()[0] not in ("rtx4090", "kernel"):  # few rows tell them from what is usual
            assert fitted[name] == pytest.approx(value, rel=tolerance), name


def test_the_record_is_of_the_committed_rows_and_of_this_code_and_its_constants_possible() -> None:
    rows = [row for row in read_rows() if row.bf16]
    assert [one.row for one in RECORD.predictions] == rows
    again = fit(RUNS)
    for constant in RECORD.constants:
        assert constant.value == pytest.approx(again[constant.name], rel=1e-3)
        most = {"microseconds": 12.0, "passes": 8.0}.get(constant.name.split()[-1], 0.951)
        assert 0 < constant.low <= constant.value <= constant.high <= most, constant.name
    for prediction, run in list(zip(RECORD.predictions, RUNS, strict=True))[::9]:
        speed = calibration.tokens_per_gpu_s(run, RECORD.fitted())
        assert speed == pytest.approx(prediction.fitted, rel=1e-3)


def test_sources_that_the_fit_has_not_seen_are_predicted() -> None:
    check = RECORD.check(SOURCES)
    assert check.rows == len(RUNS) >= 240
    assert len({run.row.source for run in RUNS}) == 10
    assert check.median <= 0.08
    assert check.nine_of_ten <= 0.2
    source = RUNS[200].row.source
    seen = fit([run for run in RUNS if run.row.source != source])
    for one, run in zip(RECORD.predictions, RUNS, strict=True):
        if run.row.source == source:
            assert one.held_out == pytest.approx(calibration.tokens_per_gpu_s(run, seen), rel=1e-3)


def test_the_range_of_other_sources_holds_nine_of_ten_rows_of_one_more() -> None:
    ratios = [
        (one.row.source, one.row.tokens_per_s_per_gpu / one.held_out) for one in RECORD.predictions
    ]
    inside = 0
    for left_out in {source for source, _ in ratios}:
        low, high = spread([one for one in ratios if one[0] != left_out])
        inside += sum(source == left_out and low <= ratio <= high for source, ratio in ratios)
    assert 0.85 <= inside / len(ratios) <= 0.95
    check = RECORD.check(SOURCES)
    assert (check.lowest, check.highest) == pytest.approx(spread(ratios), abs=1e-4)


def test_kernels_that_nobody_named_cost_accuracy_in_long_sequences_alone() -> None:
    """Rows of llm-foundry are of fused kernels around slow attention."""
    fitted, errors = RECORD.fitted(), dict[bool, list[float]]()
    for run in (run for run in RUNS if run.row.framework.startswith("composer")):
        usual = replace(run.workload, kernels="flash", attention="flash-2")
        error = 1 / ratio(replace(run, workload=usual), fitted) - 1
        errors.setdefault(run.row.length <= 4096, []).append(error)
    short = sorted(map(abs, errors[True]))
    assert median(short) == pytest.approx(0.04, abs=0.002)
    assert short[int(0.9 * len(short))] <= 0.12
    assert min(errors[False]) > 0


def test_products_in_fp8_are_predicted() -> None:
    """Two sources on H100s, and one on H200s, of which no run in bf16 is known."""
    rows = [row for row in read_rows() if not row.bf16]
    assert {row.gpu for row in rows} == {"h100-sxm", "h100-96gb", "h200"}
    fitted = RECORD.fitted()
    runs = [*map(run_of, rows)]
    ratios = [ratio(run, fitted) for run in runs]
    assert 0.93 < min(ratios) <= max(ratios) < 1.08
    assert 0.97 < sum(ratios) / len(ratios) < 1.03
    in_bf16 = [replace(run, workload=replace(run.workload, product_dtype="bf16")) for run in runs]
    assert max(ratio(run, fitted) for run in in_bf16) > 1.3


def test_given_rows_are_checked_by_committed_constants_and_too_few_are_refused() -> None:
    check = calibration.errors(read_rows(), RECORD.fitted())
    assert check.median == pytest.approx(RECORD.check("all rows, fitted").median, abs=1e-3)
    with pytest.raises(ValueError, match="rows: hold none in bf16"):
        calibration.errors([row for row in read_rows() if not row.bf16], RECORD.fitted())
    with pytest.raises(ValueError, match="rows: 3 were given, 6 constants need as many"):
        fit(RUNS[:3])


def test_a_mistake_in_a_row_names_its_line(tmp_path: Path) -> None:
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([*lines[:2], lines[2].replace(",32,8,", ",0,8,")]) + "\n")
    with pytest.raises(ValueError, match=r"rows\.csv:3: nodes: "):
        read_rows(file)


MEASURED = ("a100-40gb", "a100-80gb", "h100-96gb", "h100-sxm", "rtx4090")


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


@pytest.mark.parametrize("gbit_s", [1, 1000])
def test_a_range_holds_the_prediction_and_the_steps_at_its_ends(gbit_s: float) -> None:
    hardware = with_rates(
        cluster("a100-80gb", nodes=4, ranks_per_node=8, inter_bits_per_s=gbit_s * 1e9)
    )
    rates = hardware.rates
    option = simulated(workload("fsdp2"), hardware)
    request = Request(model="gpt-10b", hardware=hardware, kernels="flash", attention="flash-2")
    low, high = tokens_range(option, request)
    wide = tokens_range(option, replace(request, kernels=None, attention=None))
    assert wide[0] < low < high < wide[1] or gbit_s == 1
    assert low < option.tokens_per_s < high
    for times in (rates.lowest, rates.highest):
        scaled = replace(
            rates,
            products_per_s=times * rates.products_per_s,
            attention_per_s=times * rates.attention_per_s,
            bytes_per_s=times * rates.bytes_per_s,
            exchanged_bytes_per_s=times * rates.exchanged_bytes_per_s,
            kernel_seconds=rates.kernel_seconds / times,
        )
        option = simulated(workload("fsdp2"), replace(hardware, rates=scaled))
        assert low <= option.tokens_per_s <= high


@pytest.mark.parametrize(
    ("setting", "slowest_first"),
    [("kernels", ("eager", "flash", "fused")), ("attention", ("flash-1", "flash-2", "flash-3"))],
)
def test_kernels_and_generations_of_attention_differ_in_speed(
    setting: str, slowest_first: tuple[str, ...]
) -> None:
    hardware = with_rates(cluster("h100-sxm", nodes=1, ranks_per_node=8, inter_bits_per_s=1e12))
    points = (workload("fsdp2", **{setting: value}) for value in slowest_first)
    speeds = [simulated(point, hardware).tokens_per_s for point in points]
    assert speeds == sorted({*speeds})

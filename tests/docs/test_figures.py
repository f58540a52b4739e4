"""The figures of pages are drawn from committed records, and statements about them hold."""

import json
import random
import re
from pathlib import Path

import pytest

from analysis.claims import papers
from docs import draw, draw_ablation, draw_bound, draw_differences, draw_fuyou, draw_map
from experiments.matrix import reader
from experiments.records.record import read
from simulation.traffic import MEASURED
from tests.docs import ROOT

#: Figures whose texts alone are compared: their shapes differ by matplotlib's version.
TEXTS = {"ablation", "overview", "schedule"}


@pytest.mark.parametrize("name", draw.FIGURES)
def test_the_figures_are_the_committed_ones(name: str, tmp_path: Path) -> None:
    draw.main([name, "--into", str(tmp_path)])
    figures = [*tmp_path.glob("*.svg")]
    assert figures
    for figure in figures:
        drawn, committed = (
            (folder / figure.name).read_text(encoding="utf-8") for folder in (tmp_path, draw.FOLDER)
        )
        if name in TEXTS:
            drawn, committed = (
                re.findall(r"<text.*?>(.*?)</text>", of) for of in (drawn, committed)
            )
            assert len(committed) > 20
        # Matplotlib names clip paths by their last digits, which processors differ in.
        drawn, committed = (re.sub(r"\bp[0-9a-f]{10}\b", "p", str(of)) for of in (drawn, committed))
        assert drawn == committed, figure.name


def test_what_is_no_figure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        draw.main(["plan"])
    assert "'plan' is no figure; allowed: ablation, bound, " in capsys.readouterr().err


def test_ablations_have_the_records_of_the_matrix_and_both_policies_in_both_parts() -> None:
    cells = reader.read("ablation").cells
    assert [record.cell_id for record in read(draw_ablation.RECORDS)] == [cell.id for cell in cells]
    assert len({cell.subject for cell in cells}) == 7
    assert {cell.accumulation for cell in cells} == {1, 4}
    lines = (ROOT / "results/tables.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.startswith(("| none |", "| host |"))]) == 4


#: Bits per parameter that a gather may take, of 16, at three learning rates of fine-tuning.
MOST = {3e-5: 16 / 6, 1e-5: 16 / 8, 1e-6: 16 / 25}


def test_the_simulator_assumes_what_was_measured() -> None:
    bits = draw_differences.bits()
    assert dict(MEASURED) == pytest.approx(bits, rel=0.03)
    assert all(bits[rate] <= most for rate, most in MOST.items())


def test_the_chosen_amount_is_within_a_twentieth_of_the_best_that_was_measured() -> None:
    """By the cell that was given that amount: two of the same amount differ by more than that."""
    seconds, chosen = {}, None
    for record in draw_fuyou.records("fuyou-swap"):
        if draw_fuyou.swap(record) == "auto":
            chosen = draw_fuyou.chosen(record)
        else:
            seconds[draw_fuyou.chosen(record)] = record.step_seconds_median
    assert chosen in seconds
    assert seconds[chosen] <= 1.05 * min(seconds.values())


def test_what_a_convex_curve_would_have_is_the_bound_of_its_claim() -> None:
    """The bound is the line through none and 3 MiB, at twice that amount."""
    took = {
        draw_fuyou.swap(r): r.step_seconds_median or 0 for r in draw_fuyou.records("fuyou-swap")
    }
    (claim,) = (each for each in papers.load().claims if each.id == "fuyou-convex")
    bound = took["none"] / (2 * took["3 MiB"] - took["none"])
    assert claim.checks[0].tolerance.at_most == pytest.approx(bound, abs=0.005)
    assert took["none"] / took["6 MiB"] > bound


def test_cells_are_what_the_planner_says(request: pytest.FixtureRequest) -> None:
    cells = json.loads(draw_map.DATA.read_text(encoding="utf-8"))
    whole = request.config.getoption("--exhaustive")
    for entry in cells if whole else random.Random(9).sample(cells, 4):
        settings = {
            key: entry[key] for key in ("model", "gpu", "nodes", "gbit_s", "tuning", "step")
        }
        computed = draw_map.cell(**settings)
        assert computed["take"] == entry["take"]
        assert computed["tokens_per_s"] == pytest.approx(entry["tokens_per_s"], rel=1e-3)


def test_nothing_is_faster_than_what_the_map_takes_by_more_than_six_percent() -> None:
    """All that is planned there is exact."""
    for entry in json.loads(draw_map.DATA.read_text(encoding="utf-8")):
        assert entry["tokens_per_s"][entry["take"]] >= 0.94 * max(entry["tokens_per_s"].values())


def test_the_closed_form_is_more_hopeful_than_the_simulator() -> None:
    """1.3B: 382 thousand tokens by the closed form, a seventh of it by the simulator."""
    point = draw_bound.points_on(draw_bound.gpu("a100-40gb"), 100e9)[0]
    size = point.layers, point.width, point.gpus
    closed = point.tokens()
    simulated = draw_bound.tokens_that_fit(*size, vocabulary=50_257)
    assert closed == pytest.approx(382e3, rel=0.01)
    assert 0.1 < simulated / closed < 0.2

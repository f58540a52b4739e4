import itertools
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from analysis import strategies
from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.figures.axes import SEEN
from analysis.figures.drawings import Drawing, save
from analysis.load.table import frame
from experiments.records.record import Record
from tests.analysis import made_up

LINKS = [link for link in made_up.LINKS if link is not None]


@pytest.fixture(scope="module")
def drawings(compared: pd.DataFrame) -> list[Drawing]:
    return matrix.draw(compared)


def drawn_as(what: str, *records: Record) -> Drawing:
    """The drawing of these records that has this at the end of its name."""
    (drawing,) = (d for d in matrix.draw(compare(records)) if d.name.endswith(what))
    return drawing


def panel_title(record: Record) -> str:
    tuning = {"full": "full fine-tuning", "lora": "LoRA"}[record.cell.tuning]
    return f"{record.cell.model.name}\n{tuning}"


def points(ax: Axes, colour: str) -> set[tuple[float, float]]:
    """Every point of a line or marker of this colour, in data coordinates."""
    lines: list[Any] = [line for line in ax.lines if line.get_transform() == ax.transData]
    return {
        (round(x, 6), round(y, 6))
        for line in lines
        if to_hex(line.get_color()) == colour.lower()
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def widths(ax: Axes, colour: str | None = None) -> list[float]:
    bars: list[Any] = list(ax.patches)
    return [
        bar.get_width()
        for bar in bars
        if colour is None or to_hex(bar.get_facecolor()) == colour.lower()
    ]


def test_throughput_drawn_is_the_records(records: list[Record], drawings: list[Drawing]) -> None:
    axes = {ax.get_title(): ax for ax in drawings[0].figure.axes if ax.get_title()}
    assert len(axes) == 4
    expected: dict[tuple[str, str], set[tuple[float, float]]] = defaultdict(set)
    for record in records:
        ticks = axes[panel_title(record)].get_xticks()
        link = record.cell.inter_bandwidth_bits_per_s
        place = ticks[-1] if link is None else link / 1e6
        if record.tokens_per_s is not None:
            point = (round(float(place), 6), round(record.tokens_per_s, 6))
            expected[panel_title(record), record.cell.strategy].add(point)
    for (title, strategy), coordinates in expected.items():
        look = strategies.styles([strategy])[strategy]
        assert points(axes[title], look.colour) == coordinates
    # An unshaped link has a name, and no number.
    labels = drawings[0].figure.axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["10", "100", "unshaped"]


#: More strategies than one column has room for, by the engine whose column they stand in.
ENGINES = {
    "DeepSpeed": ["deepspeed-zero3", "deepspeed-hpz", "deepspeed-offload"],
    "PyTorch": ["fsdp2", "fsdp2-hsdp", "ddp"],
    "This engine": ["zero3", "another", "fcdp"],
}


def test_of_many_a_column_has_its_engine_and_what_all_are_compared_with() -> None:
    names = [*itertools.chain(*ENGINES.values())]
    cells = [
        made_up.cell("fsdp2", link=link).model_copy(update={"strategy": name})
        for link in LINKS
        for name in names
    ]
    records = [
        made_up.record(made_up.cell("fsdp2"), cell=of, cell_id=of.id, step_seconds=[1.0 + at])
        for at, of in enumerate(cells)
    ]
    looks = strategies.styles(names)
    axes = drawn_as("throughput", *records).figure.axes
    assert len(axes) == len(ENGINES)
    for engine, ax in zip(ENGINES, axes, strict=True):
        assert ax.get_title() == f"{engine}\ngpt2-4x128, full fine-tuning"
        shown = {*ENGINES[engine], "deepspeed-zero3", "fcdp"}
        for name in names:
            speeds = {round(r.tokens_per_s or 0, 6) for r in records if r.cell.strategy == name}
            drawn = {speed for _, speed in points(ax, looks[name].colour)}
            assert drawn == (speeds if name in shown else set())


def test_bytes_drawn_are_the_records(records: list[Record], drawings: list[Drawing]) -> None:
    columns = len(drawings[0].figure.axes) // 2
    for at in range(columns):
        upper, lower = (drawings[0].figure.axes[at + row * columns] for row in (0, 1))
        for strategy, look in strategies.styles(made_up.TRAFFIC).items():
            cells = [
                record.measurement
                for record in records
                if panel_title(record) == upper.get_title()
                and record.cell.strategy == strategy
                and record.measurement is not None
            ]
            sent = pd.Series([cell.inter_node_bytes_per_step for cell in cells]).median()
            least = pd.Series([cell.inter_node_bytes_closed_form for cell in cells]).median()
            assert widths(lower, look.colour) == pytest.approx([sent / 1e6])
            marks: list[Any] = list(lower.lines)
            assert any(mark.get_xdata()[0] == pytest.approx(least / 1e6) for mark in marks)
        looks = strategies.styles(made_up.TRAFFIC).values()
        seen = [widths(lower, look.colour)[0] for look in looks]
        assert (lower.get_xscale() == "log") == (max(seen) > SEEN * min(seen))


def test_speed_ups_are_the_comparisons(compared: pd.DataFrame, drawings: list[Drawing]) -> None:
    texts = [item.get_text() for ax in drawings[0].figure.axes for item in ax.texts]
    drawn = [text for text in texts if text.endswith("×")]
    fcdp = compared.query(f"strategy == 'fcdp' and baseline == '{strategies.BASELINE}'")
    assert len(drawn) == len(fcdp) == 11
    assert "28×" in drawn


def test_losses_drawn_are_the_records(records: list[Record], drawings: list[Drawing]) -> None:
    ax = drawings[1].figure.axes[0]
    cells = [
        record.measurement.losses
        for record in records
        if panel_title(record) == ax.get_title() and record.measurement is not None
    ]
    lines: list[Any] = list(ax.lines)
    assert sorted(list(line.get_ydata()) for line in lines) == sorted(cells)


def test_phases_drawn_are_the_records(records: list[Record], drawings: list[Drawing]) -> None:
    """A bar per strategy, its phases one after the other; rewards by the time that has passed."""
    assert not [drawing for drawing in drawings if drawing.name.endswith("phases")]
    fcdp = next(r for r in records if r.measurement and r.cell.strategy == "fcdp")
    seconds = {"generation_seconds": 3.0, "scoring_seconds": 1.0, "update_seconds": 2.0}
    sent = {"generation_bytes": 5e6, "scoring_bytes": 0.0, "update_bytes": 4e6}
    rewards = [0.1, *(0.2 for _ in fcdp.measurement.step_seconds)]
    fields = {**seconds, **sent, "rewards": rewards, "reward": 0.2}
    drawn = drawn_as("phases", made_up.altered(fcdp, **fields))
    in_seconds, in_megabytes, reward = drawn.figure.axes
    assert widths(in_seconds) == [0, 3, 1, 2]
    assert widths(in_megabytes) == [0, 5, 0, 4]
    (line,) = reward.lines
    assert list(line.get_xdata()) == [*itertools.accumulate(fcdp.measurement.step_seconds)]
    assert list(line.get_ydata()) == rewards[1:]


def test_long_lines_of_losses_are_thinned_and_say_so() -> None:
    losses = [float(step) for step in range(1300)]
    of = made_up.cell("fcdp", warmup_steps=1, steps=1299)
    drawn = drawn_as("losses", made_up.record(of, losses=losses))
    (line,) = drawn.figure.axes[0].lines
    assert list(line.get_ydata()) == [*losses[::13], losses[-1]]
    assert list(line.get_xdata())[-1] == 1300
    assert "at 100 optimizer steps of each line, or all if fewer, and the last" in drawn.caption


def test_files_are_written_and_the_same_every_time(records: list[Record], tmp_path: Path) -> None:
    few = compare(records[:3])
    (png, svg), again = (save(matrix.draw(few)[0], tmp_path / name) for name in ("a", "b"))
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert [png.read_bytes(), svg.read_bytes()] == [file.read_bytes() for file in again]


def test_the_caption_says_where_the_numbers_come_from(drawings: list[Drawing]) -> None:
    caption = drawings[0].caption
    for part in ("Matrix made-up", "2 nodes × 2 ranks, emulated", "gpt2-4x128 (1.70 M)"):
        assert part in caption
    for part in ("2026-01-02", "commit 0123456789", "deepspeed 0.19.6", "(failed)"):
        assert part in caption
    record = made_up.record(made_up.cell("fcdp"), commit="0123456789abcdef-dirty")
    assert "commit 0123456789-dirty" in matrix.draw(compare([record]))[0].caption


def test_kinds_of_evidence_have_figures_of_their_own() -> None:
    cell = made_up.cell("fcdp", link=LINKS[0])
    mixed = [made_up.record(cell), made_up.record(cell, evidence="simulated")]
    names = [drawing.name for drawing in matrix.draw(compare(mixed))]
    kinds = itertools.product(("emulated", "simulated"), ("traffic", "losses"))
    assert sorted(names) == sorted(f"made-up-{evidence}-{what}" for evidence, what in kinds)


def test_neither_a_sweep_of_many_settings_nor_what_has_no_result_is_drawn() -> None:
    lengths = range(2, matrix.MOST_FIGURES + 3)
    made = [made_up.record(made_up.cell("fcdp", sequence_length=length)) for length in lengths]
    assert matrix.draw(compare(made)) == []
    assert len(matrix.draw(compare(made[:2]))) == 4
    oom = made_up.record(made_up.cell("fcdp"), state="oom", error="no room", measurement=None)
    assert matrix.draw(compare([oom])) == []


def test_a_variants_gain_is_over_the_reference_and_none_within_the_spread() -> None:
    timed = {"none": [2.0, 2.2], "host": [1.0, 1.1], "disk": [2.1, 2.3]}
    records = [
        made_up.record(made_up.cell("fcdp", link=LINKS[0], policy=policy), step_seconds=seconds)
        for policy, seconds in timed.items()
    ]
    (traffic, *_) = matrix.draw(compare(records))
    texts = [text.get_text() for text in traffic.figure.axes[0].texts]
    beside = [text.partition("  ")[2] for text in texts]
    assert beside == ["2.0×", "not significant", "reference"]
    assert "not significant: its interval has 1 in it" in traffic.caption


def test_bytes_and_activations_of_slots_are_the_records() -> None:
    interleaved = {"activation_bytes_by_slot": [3e6, 3e6], "activation_bytes_together": 4e6}
    figures: dict[str, dict[str, Any]] = {
        "ddp": {"inter_node_bytes_per_step": 5e6},
        "cyclic-ring": {"bytes_by_slot": [1e6, 2e6]},
        "cyclic-interleaved": interleaved,
    }
    made = [made_up.record(made_up.cell(name), **fields) for name, fields in figures.items()]
    drawing = drawn_as("slots", *made)
    sent, activations = drawing.figure.axes
    values: list[list[list[float]]] = [
        [[*map(float, line.get_ydata())] for line in ax.lines]  # type: ignore[arg-type, union-attr]
        for ax in (sent, activations)
    ]
    assert values == [[[1, 2], [5, 5]], [[3, 3], [4, 4]]]
    labels = [str(text.get_text()) for text in drawing.figure.legends[0].get_texts()]
    assert labels == ["cyclic-ring", "cyclic-interleaved", "all at once"]


def test_points_over_intervals_are_the_records_and_lines_their_medians() -> None:
    seeds, intervals = (0, 1, 2), (3, 12, 48)

    def record(strategy: str, seed: int, steps: int, loss: float, **settings: Any) -> Record:
        of = made_up.cell(strategy, link=10**8, seed=seed, **settings)
        return made_up.record(of, held_out_loss=loss, steps_per_round=steps)

    def loss_of(interval: int, seed: int) -> float:
        return 3 + interval / 100 + seed / 10

    records = [record("fsdp2", seed, 1, 2.5 + seed / 10) for seed in seeds]
    for seed, tau in itertools.product(seeds, intervals):
        records.append(record("co2", seed, tau, loss_of(tau, seed), interval=tau))
    drawing = drawn_as("intervals", *records)
    (ax,) = drawing.figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "12", "48"]
    looks = strategies.styles(["fsdp2", "co2"])

    def lines(strategy: str) -> list[Any]:
        return [drawn for drawn in ax.lines if drawn.get_color() == looks[strategy].colour]

    joined, points = lines("co2")
    medians = [median(loss_of(tau, seed) for seed in seeds) for tau in intervals]
    assert list(joined.get_xdata()) == list(intervals)
    assert list(joined.get_ydata()) == pytest.approx(medians)
    all_ = sorted(loss_of(tau, seed) for tau in intervals for seed in seeds)
    assert sorted(points.get_ydata()) == pytest.approx(all_)
    (level,) = lines("fsdp2")
    assert list(level.get_ydata()) == pytest.approx([2.6, 2.6])
    assert "A point per seed, of 3" in drawing.caption
    # One interval is no curve.
    alike = [item for item in records if item.measurement.steps_per_round < 4]
    assert not matrix.has_intervals(frame(alike))

"""Many strategies have a column per engine, with the records' values."""

from typing import Any

import pytest
from matplotlib.colors import to_hex

from analysis import strategies
from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.figures.drawings import Drawing
from experiments.records.record import Record
from tests.analysis import made_up

#: The records, and the drawings by what they show.
Drawn = tuple[list[Record], dict[str, Drawing]]
ENGINES = {
    "DeepSpeed": [f"deepspeed-{name}" for name in ("zero3", "hpz", "hpz-offload", "offload")],
    "PyTorch": ["fsdp2", "fsdp2-hsdp", "fsdp2-reshard", "fsdp2-offload", "ddp"],
    "This engine": ["zero3", "hpz", "qwz", "qgz", "zeropp", "another", "fcdp"],
}
NAMES = [name for names in ENGINES.values() for name in names]


def made(link: int | None, tuning: str, at: int) -> Record:
    """A cell of one strategy, each a little slower than the one before."""
    base = made_up.cell("fsdp2", tuning=tuning, link=link)
    of, like = base.model_copy(update={"strategy": NAMES[at]}), made_up.figures(base)
    return made_up.record(
        base,
        cell=of,
        cell_id=of.id,
        step_seconds=[second * (1 + at / 10) for second in like["step_seconds"]],
        inter_node_bytes_per_step=like["inter_node_bytes_per_step"] * (1 + at),
    )


def drawn(*links: int | None) -> Drawn:
    records = [
        made(link, tuning, at)
        for link in links
        for tuning in ("full", "lora")
        for at in range(len(NAMES))
    ]
    drawings = matrix.draw(compare(records))
    return records, {item.name.rpartition("-")[2]: item for item in drawings}


@pytest.fixture(scope="module")
def many() -> Drawn:
    return drawn(*made_up.LINKS)


def test_a_column_has_its_engine_and_what_all_are_compared_with(many: Drawn) -> None:
    records, drawings = many
    looks = strategies.styles(NAMES)
    axes = drawings["throughput"].figure.axes
    assert len(axes) == 2 * len(ENGINES)
    for engine, ax in zip(ENGINES, axes, strict=False):
        assert ax.get_title() == f"{engine}\ngpt2-4x128, full fine-tuning"
        expected = {
            (to_hex(looks[record.cell.strategy].colour), round(record.tokens_per_s or 0, 6))
            for record in records
            if record.cell.tuning == "full"
            and record.cell.strategy in {*ENGINES[engine], "deepspeed-zero3", "fcdp"}
        }
        lines: list[Any] = [line for line in ax.lines if line.get_transform() == ax.transData]
        points = {
            (to_hex(line.get_color()), round(float(y), 6))
            for line in lines
            for y in line.get_ydata()
        }
        assert points == expected

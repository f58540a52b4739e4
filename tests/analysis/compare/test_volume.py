"""The records of the matrix ``volume`` beside the project's first measurements of that model.

What differs is said in bytes. Over 2 × 2 ranks a ring sends 3/4 of what is gathered over each
node's link, and gloo's reduce-scatter, an all-reduce, 3/2 of what is reduced.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.load.table import load
from experiments.records.record import Record

RECORDS = Path(__file__).resolve().parents[3] / "results/volume/records.jsonl"
GATHERED, REDUCED = 3 / 4, 3 / 2
BYTES = 2  # bfloat16
LAYERS, WIDTH, RANK = 4, 256, 8
#: Embeddings and the last norm: FSDP2's root, which was gathered again in backward then.
ROOT = 3_450_368 - LAYERS * (12 * WIDTH**2 + 13 * WIDTH)
#: Adapters on the output projection, which there were none of then.
MORE_ADAPTERS = LAYERS * RANK * 2 * WIDTH

#: MB a step that one node sent then, and what it differs by now.
FIRST: dict[tuple[str, str], tuple[float, float]] = {
    ("fsdp2", "full"): (20.81, -GATHERED * ROOT * BYTES),
    ("fsdp2", "lora"): (
        10.68,
        BYTES * (-GATHERED * ROOT + (2 * GATHERED + REDUCED) * MORE_ADAPTERS),
    ),
    ("fsdp2-reshard", "full"): (15.61, 0),
    ("fsdp2-hsdp", "full"): (6.94, 0),
    ("deepspeed-hpz", "full"): (15.64, 0),
    ("deepspeed-hpz@paper", "full"): (15.64, 0),
    ("fcdp", "full"): (6.93, 0),
    ("fcdp", "lora"): (0.077, BYTES * MORE_ADAPTERS),
}
VERSIONS = {"current": "0.19.6", "paper": "0.16.2"}


@pytest.fixture(scope="module")
def records() -> dict[tuple[str, str], Record]:
    return {(r.cell.variant, r.cell.tuning): r for r in load(RECORDS) if r.state == "ok"}


def sent(record: Record) -> float:
    assert record.measurement is not None
    return record.measurement.inter_node_bytes_per_step / 1e6


@pytest.mark.parametrize(("variant", "tuning"), FIRST)
def test_the_first_measurements_are_found_again(
    records: dict[tuple[str, str], Record], variant: str, tuning: str
) -> None:
    first, difference = FIRST[variant, tuning]
    # The last digit of a small figure, and its messages and barriers, are more than 3 % of it.
    expected = pytest.approx(first + difference / 1e6, rel=0.03, abs=0.01)
    assert sent(records[variant, tuning]) == expected


@pytest.mark.parametrize("pin", VERSIONS)
def test_a_record_names_the_version_that_trained(
    records: dict[tuple[str, str], Record], pin: str
) -> None:
    found = [
        r for r in records.values() if r.cell.deepspeed == pin and "deepspeed" in r.cell.strategy
    ]
    assert len(found) == 4
    for record in found:
        assert record.measurement is not None
        assert record.measurement.engine_version == VERSIONS[pin] == record.versions["deepspeed"]


@pytest.mark.parametrize("name", ["deepspeed-zero3", "deepspeed-zero3@paper"])
def test_zero3_keeps_less_alive_than_with_defaults_and_more_than_nothing(
    records: dict[tuple[str, str], Record], name: str
) -> None:
    """tests/experiments/test_volume.py keeps nothing alive, and finds 21.68 again."""
    assert 15.58 < sent(records[name, "full"]) < 21.68
    assert sent(records[name, "lora"]) < 10.78


@pytest.mark.parametrize("suffix", ["", "@paper"])
def test_hpz_does_not_send_the_half_of_the_papers_table(
    records: dict[tuple[str, str], Record], suffix: str
) -> None:
    zero3, hpz = (records[f"deepspeed-{name}{suffix}", "lora"] for name in ("zero3", "hpz"))
    assert sent(hpz) < 0.05 * sent(zero3)


def test_both_pins_send_the_same(records: dict[tuple[str, str], Record]) -> None:
    for name in ("deepspeed-zero3", "deepspeed-hpz"):
        for tuning in ("full", "lora"):
            usual, paper = records[name, tuning], records[f"{name}@paper", tuning]
            assert sent(paper) == pytest.approx(sent(usual), rel=0.01)

"""Where the paper's numbers hold together, and what the answer depends on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.paper import region

FOUND = json.loads(region.FOUND.read_text(encoding="utf-8"))


def test_at_the_committed_point_eleven_of_twelve_are_within_15_percent() -> None:
    off = region.away(FOUND["point"], region.papers_numbers())

    assert len(off) == 12
    assert sum(share <= 0.15 for share in off.values()) >= 11


def test_the_committed_numbers_are_what_the_simulator_says_there() -> None:
    assert region.numbers(FOUND["point"]) == pytest.approx(FOUND["numbers"], rel=1e-5)


def test_the_committed_point_lies_in_the_declared_ranges() -> None:
    unknowns = region.load().unknowns

    assert list(FOUND["point"]) == list(unknowns)
    for name, value in FOUND["point"].items():
        low, high = unknowns[name].between or (value, value)
        assert low <= value <= high, name
        assert value in (unknowns[name].values or (value,)), name


def test_what_is_said_depends_on_the_numbers(tmp_path: Path) -> None:
    altered = tmp_path / "region.json"
    numbers = FOUND["numbers"] | {"fcdp-100x-zero3": 10.0}
    altered.write_text(json.dumps(FOUND | {"numbers": numbers}), encoding="utf-8")

    assert region.in_words(altered) != region.in_words()


def test_an_unknown_without_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="has values, or is between two"):
        region.Unknown(source="nowhere")


def test_the_search_finds_the_committed_point_again() -> None:
    assert region.search(region.load()) == FOUND["point"]


def test_a_narrower_range_moves_what_is_found_or_loses_it() -> None:
    holds = region.load()
    narrow = region.Unknown(values=(8.0,), source="as of full fine-tuning")
    altered = holds.model_copy(update={"unknowns": holds.unknowns | {"table_micro_batch": narrow}})

    off = region.away(region.search(altered), region.papers_numbers())

    assert off["fcdp-lora-6x"] > holds.tolerances["fcdp-lora-6x"]

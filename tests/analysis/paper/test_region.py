"""The region where the paper's numbers hold together, and the unknowns that decide it."""

import pytest

from analysis.claims import papers
from analysis.claims.papers import Tolerance
from analysis.paper import region
from analysis.paper.region import Asked, Points, Unknown

KNOWN = region.region(papers.load())
BEST = KNOWN.points.best


def verdict(name: str, asks: Asked, **narrower: Unknown) -> str:
    """The verdict on a claim with another number or tolerance, or other ranges."""
    holds = KNOWN.holds.model_copy(update={"unknowns": KNOWN.holds.unknowns | narrower})
    return region.ranges(holds, KNOWN.points, {name: asks})[name].verdict


def test_at_the_best_point_eleven_of_twelve_are_within_15_percent() -> None:
    near = Tolerance(relative=0.15)
    off = [
        Asked(KNOWN.paper[name].number, near).away(BEST.numbers[name] or 0.0)
        for name in KNOWN.holds.numbers
    ]
    assert len(off) == 12
    assert sum(value <= 1 for value in off) >= 11


def test_the_search_finds_the_committed_point_again() -> None:
    assert region.simulated(region.search(KNOWN.holds, KNOWN.paper)) == BEST
    # The source that a system was read from counts for nothing.
    assert {KNOWN.ranges[name].verdict for name in KNOWN.holds.fitted} == {"fitted"}


def test_the_committed_numbers_are_what_the_simulator_says_of_the_drawn_points() -> None:
    points = region.draw(KNOWN.holds)
    assert [drawn.point for drawn in KNOWN.points.drawn] == points
    assert region.simulated(points[-1]) == KNOWN.points.drawn[-1]
    assert all(KNOWN.holds.unknowns[name].has(at) for name, at in BEST.point.items())


def test_a_tolerance_an_unknowns_range_and_a_record_flip_the_verdict() -> None:
    asks = KNOWN.paper["fcdp-100x-zero3"]
    assert verdict("fcdp-100x-zero3", asks) == "in part of the range"
    wide, exact = (asks._replace(tolerance=Tolerance(relative=by)) for by in (1e3, 1e-9))
    assert verdict("fcdp-100x-zero3", wide) == "over the whole range"
    assert verdict("fcdp-100x-zero3", exact) == "outside the range"
    asks = KNOWN.paper["fcdp-lora-6x"]
    only = KNOWN.holds.unknowns["table_micro_batch"].model_copy(update={"values": (8.0,)})
    assert verdict("fcdp-lora-6x", asks) == "in part of the range"
    assert verdict("fcdp-lora-6x", asks, table_micro_batch=only) == "outside the range"
    name = "fcdp-volume-comm-total"
    drawn = [
        p.model_copy(update={"numbers": p.numbers | {name: 2 * (p.numbers[name] or 0)}})
        for p in KNOWN.points.drawn
    ]
    altered = Points(best=BEST, drawn=tuple(drawn))
    assert KNOWN.ranges[name].verdict == "over the whole range"
    assert region.ranges(KNOWN.holds, altered, KNOWN.paper)[name].verdict == "outside the range"


def test_an_unknown_without_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="has values, or is between two"):
        Unknown(source="nowhere", words="anything")


def test_the_sentence_names_the_unknowns_that_matter() -> None:
    def lost(name: str, unknown: Unknown) -> int:
        ends = unknown.between or (min(unknown.values), max(unknown.values))
        there = [region.numbers({**BEST.point, name: end}) for end in ends]
        return max(
            sum(KNOWN.paper[of].away(ours[of]) > 1 for of in KNOWN.holds.numbers) for ours in there
        )

    matter = {name for name, unknown in KNOWN.holds.unknowns.items() if lost(name, unknown) >= 3}
    assert matter == {name for name in KNOWN.holds.unknowns if f"{{{name}}}" in KNOWN.holds.opening}

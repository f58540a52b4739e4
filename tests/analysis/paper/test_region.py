"""The region where the paper's numbers hold together, and the unknowns that decide it."""

import pytest

from analysis.claims import papers
from analysis.claims.papers import Tolerance
from analysis.paper import region
from analysis.paper.region import Asked, Points, Unknown

KNOWN = region.region(papers.load())
BEST = KNOWN.points.best


def agrees(name: str, asks: Asked, **narrower: Unknown) -> bool | None:
    """Whether a claim with another number or tolerance, or other ranges, agrees everywhere."""
    holds = KNOWN.holds.model_copy(update={"unknowns": KNOWN.holds.unknowns | narrower})
    return region.ranges(holds, KNOWN.points, {name: asks})[name].agrees


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
    assert {KNOWN.ranges[name].agrees for name in KNOWN.holds.fitted} == {None}


def test_the_committed_numbers_are_what_the_simulator_says_of_the_drawn_points() -> None:
    points = region.draw(KNOWN.holds)
    assert [drawn.point for drawn in KNOWN.points.drawn] == points
    assert region.simulated(points[-1]) == KNOWN.points.drawn[-1]
    assert all(KNOWN.holds.unknowns[name].has(at) for name, at in BEST.point.items())


def test_a_tolerance_an_unknowns_range_and_a_record_decide_whether_a_number_agrees() -> None:
    asks = KNOWN.paper["fcdp-100x-zero3"]
    assert agrees("fcdp-100x-zero3", asks) is None
    wide, exact = (asks._replace(tolerance=Tolerance(relative=by)) for by in (1e3, 1e-9))
    assert agrees("fcdp-100x-zero3", wide) is True
    assert agrees("fcdp-100x-zero3", exact) is False
    asks = KNOWN.paper["fcdp-lora-6x"]
    only = KNOWN.holds.unknowns["table_micro_batch"].model_copy(update={"values": (8.0,)})
    assert agrees("fcdp-lora-6x", asks) is None
    assert agrees("fcdp-lora-6x", asks, table_micro_batch=only) is False
    name = "fcdp-volume-comm-total"
    drawn = [
        p.model_copy(update={"numbers": p.numbers | {name: 2 * (p.numbers[name] or 0)}})
        for p in KNOWN.points.drawn
    ]
    altered = Points(best=BEST, drawn=tuple(drawn))
    assert KNOWN.ranges[name].agrees is True
    assert region.ranges(KNOWN.holds, altered, KNOWN.paper)[name].agrees is False


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

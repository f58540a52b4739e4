"""The region where the paper's numbers hold together, and the unknowns that decide it."""

import pytest

from analysis.claims import papers
from analysis.paper import region
from analysis.paper.region import Unknown

KNOWN = region.region(papers.load())
BEST = KNOWN.points.best


def test_the_search_finds_the_committed_point_again() -> None:
    assert region.simulated(region.search(KNOWN.holds, KNOWN.paper)) == BEST
    # The source that a system was read from counts for nothing.
    assert {KNOWN.ranges[name].agrees for name in KNOWN.holds.fitted} == {None}


def test_the_committed_numbers_are_what_the_simulator_says_of_the_drawn_points() -> None:
    points = region.draw(KNOWN.holds)
    assert [drawn.point for drawn in KNOWN.points.drawn] == points
    assert region.simulated(points[-1]) == KNOWN.points.drawn[-1]
    assert all(KNOWN.holds.unknowns[name].has(at) for name, at in BEST.point.items())


def test_points_beyond_an_unknowns_range_do_not_count() -> None:
    name, unknowns = "fcdp-lora-6x", dict(KNOWN.holds.unknowns)
    of = unknowns["table_micro_batch"]
    unknowns["table_micro_batch"] = of.model_copy(update={"values": (8.0,)})
    narrower = KNOWN.holds.model_copy(update={"unknowns": unknowns})
    assert KNOWN.ranges[name].agrees is None
    assert region.ranges(narrower, KNOWN.points, KNOWN.paper)[name].agrees is False


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

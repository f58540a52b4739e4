"""The figures that docs/planning.md names are those of the code."""

from __future__ import annotations

import re

from simulation import compute
from simulation.hardware import LINK_EFFICIENCY
from simulation.planner.search import SAME, tie
from tests.docs import DOCS


def test_shares_and_tolerances() -> None:
    text = " ".join((DOCS / "planning.md").read_text(encoding="utf-8").split())
    for share, what in (
        (LINK_EFFICIENCY, r"(\d+) % \(links\)"),
        (SAME, r"within (\d+) % of what an earlier one reaches"),
        (tie(), r"within (\d+) % of it: the simulator"),
    ):
        found = re.search(what, text)
        assert found is not None, what
        assert int(found[1]) == round(100 * share)


def test_errors_of_computation() -> None:
    text = " ".join((DOCS / "planning.md").read_text(encoding="utf-8").split())
    record = compute.read()
    half, other = record.check(compute.SOURCES), record.check(compute.ARCHITECTURES)
    assert f"to {len(record.predictions)} published runs" in text
    assert f"are predicted to {half.median:.1%} in the median" in text.replace(" %", "%")
    assert f"nine of ten are within {half.nine_of_ten:.1%}" in text.replace(" %", "%")
    assert f"the other to {other.median:.0%} in the median" in text.replace(" %", "%")
    assert f"from −{1 - other.lowest:.0%} (" in text.replace(" %", "%")
    assert f"to +{other.highest - 1:.0%}" in text.replace(" %", "%")

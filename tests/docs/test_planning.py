"""The figures that docs/planning.md names are those of the code."""

from __future__ import annotations

import re

from simulation.hardware import LINK_EFFICIENCY, MATMUL_EFFICIENCY
from simulation.planner.plan import TIE
from simulation.planner.search import SAME
from tests.docs import DOCS


def test_shares_and_tolerances() -> None:
    text = " ".join((DOCS / "planning.md").read_text(encoding="utf-8").split())
    for share, what in (
        (LINK_EFFICIENCY, r"(\d+) % \(links\)"),
        (MATMUL_EFFICIENCY, r"(\d+) % \(matrix products\)"),
        (SAME, r"within (\d+) % of what an earlier one reaches"),
        (TIE, r"within (\d+) % of it: the simulator"),
    ):
        found = re.search(what, text)
        assert found is not None, what
        assert int(found[1]) == round(100 * share)

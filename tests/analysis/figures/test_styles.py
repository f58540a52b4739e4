"""Every strategy has a style, and so has each of its variants."""

from __future__ import annotations

import pytest

from analysis import strategies
from baselines.registry import STRATEGY_NAMES


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_variants_of_every_engine_have_styles_of_their_own(name: str) -> None:
    names = [f"{name} {setting}" for setting in ("τ = 48", "CDP-v1")]
    looks = strategies.styles(names)
    assert {*looks} == {*names}
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(names)

"""Each strategy of the registry has its scheme, or is refused by name."""

from __future__ import annotations

import pytest

from baselines import registry
from simulation.schemes import PLANNED, SCHEMES, scheme


@pytest.mark.parametrize("entry", registry.ENTRIES, ids=lambda entry: str(entry.name))
def test_every_strategy_is_simulated_or_refused(entry: registry.Entry) -> None:
    if entry.name in PLANNED:
        with pytest.raises(ValueError, match="is not simulated yet; allowed are zero3"):
            scheme(entry.name)
    else:
        assert scheme(entry.name).engine == entry.engine


@pytest.mark.parametrize("name", PLANNED)
def test_sibling_systems_have_their_place(name: str) -> None:
    assert name not in SCHEMES
    with pytest.raises(ValueError, match=f"strategy = '{name}': is not simulated yet"):
        scheme(name)


def test_an_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="strategy = 'zero4': allowed are zero3"):
        scheme("zero4")

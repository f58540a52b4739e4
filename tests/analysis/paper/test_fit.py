"""What is fitted, what is predicted, and what contradicts what, on made-up curves."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.claims import papers
from analysis.claims.papers import Claim
from analysis.paper import contents, fit
from analysis.paper.contents import Fit
from analysis.paper.fit import Curve, Setting, Sweeps

SHORT: Setting = (("length", 1.0),)
LONG: Setting = (("length", 2.0),)
GRID = np.linspace(0.1, 1.0, 901)


def made_up(assumed: float = 1.0) -> Fit:
    target = {
        "short": "made up",
        "compute": {"kind": "value", "quantity": "tokens_per_s", "of": {"strategy": "fcdp"}},
    }
    return Fit.model_validate(
        {
            "unknown": "share",
            "assumed": {"length": assumed},
            "fitted": "a",
            "tolerance": 0.15,
            "words": {"share": "share", "length": "length"},
            "sweeps": [{"matrix": "m", "unknowns": {"x": "share", "y": "length"}}],
            "targets": [{"claim": name, **target} for name in "abc"],
        }
    )


def claim(name: str, number: float) -> Claim:
    return Claim(
        id=name, paper="p", where="1", claim=name, label="text", number=number, unit="tokens/s"
    )


def curves(of: dict[tuple[str, Setting], np.ndarray], **numbers: float) -> Sweeps:
    """Curves of these values, which hold within 15 %."""
    target = made_up().targets[0]
    return Sweeps(
        GRID,
        (0.1, 1.0),
        {
            (name, setting): Curve(
                claim(name, numbers[name]),
                target,
                setting,
                values,
                np.abs(values - numbers[name]) <= 0.15 * numbers[name],
            )
            for (name, setting), values in of.items()
        },
    )


@pytest.fixture
def sweeps() -> Sweeps:
    """``a`` and ``b`` agree at 0.5 of the short one; ``c`` holds with the long one alone."""
    flat = np.full_like(GRID, 1.0)
    return curves(
        {
            ("a", SHORT): 80 * GRID,
            ("b", SHORT): 10 * GRID,
            ("c", SHORT): flat,
            ("a", LONG): 20 * GRID,
            ("b", LONG): 10 * GRID,
            ("c", LONG): 7 * flat,
        },
        a=40,
        b=5,
        c=7,
    )


def test_one_number_is_fitted_and_the_others_are_predicted(sweeps: Sweeps) -> None:
    found = fit.fitted(made_up(), sweeps)

    assert found.value == pytest.approx(0.5)
    assert [item.kind for item in found.predictions] == ["fitted", "predicted", "predicted"]
    assert [item.ours for item in found.held_out] == [pytest.approx(5), pytest.approx(1)]
    assert [item.holds for item in found.held_out] == [True, False]
    assert [item.asks for item in found.held_out] == [pytest.approx(0.5), None]


def test_what_no_setting_satisfies_together_is_found_once(sweeps: Sweeps) -> None:
    found = fit.fitted(made_up(), sweeps)

    # With the long one ``a`` reaches half of its number.
    assert [[one.id for one in names] for names in found.contradictions] == [["a", "c"]]


def test_the_widest_region_with_the_most_claims_is_named(sweeps: Sweeps) -> None:
    best = fit.fitted(made_up(), sweeps).best

    # Either a and b with the short one, or b and c with the long one; both over the same shares.
    assert best.count == 2
    low, high = best.between
    assert [low, high] == pytest.approx([0.425, 0.575], abs=2e-3)


def test_what_the_unknown_does_not_move_asks_for_none(sweeps: Sweeps) -> None:
    flat = {key: np.full_like(GRID, 5.0) if key[0] == "b" else curve.values
            for key, curve in sweeps.curves.items()}  # fmt: skip

    found = fit.fitted(made_up(), curves(flat, a=40, b=5, c=7))

    assert found.held_out[0].holds
    assert found.held_out[0].asks is None


def test_a_number_that_no_value_gives_cannot_be_fitted(sweeps: Sweeps) -> None:
    with pytest.raises(ValueError, match="no share gives a under what is assumed"):
        fit.fitted(made_up(assumed=2.0), sweeps)


def test_an_assumption_that_was_not_simulated_is_named(sweeps: Sweeps) -> None:
    with pytest.raises(ValueError, match=r"was not simulated; allowed are .*\[1\.0, 2\.0\]"):
        fit.fitted(made_up(assumed=3.0), sweeps)


def test_one_assumption_is_changed_at_a_time(sweeps: Sweeps) -> None:
    changes = fit.moved(made_up(), sweeps, 0.5)

    assert [changed for _, changed, _ in changes] == ["", "length"]
    assert [list(values) for _, _, values in changes] == [
        pytest.approx([40, 5, 1]),
        pytest.approx([10, 5, 7]),
    ]


def test_contents_name_claims_that_there_are() -> None:
    known = papers.load()
    missing = known.model_copy(
        update={"claims": tuple(one for one in known.claims if one.id != "fcdp-full-gain")}
    )

    fitted = contents.load(known).fit
    assert fitted is not None
    assert fitted.fitted == "fcdp-full-gain"
    with pytest.raises(ValueError, match="'fcdp-full-gain' is no claim"):
        contents.load(missing)

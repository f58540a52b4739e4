"""What each claim comes to under every setting that the sweeps of unknowns were simulated with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from analysis.claims.computations import SCALES, taken
from analysis.claims.papers import Claim, Claims
from analysis.load.rows import Row
from analysis.paper.contents import Fit, Sweep, Target

#: Points of the fitted unknown between the first and the last that was simulated.
POINTS = 1301
#: The unknowns but the fitted one, and their values, in the order of the contents.
Setting = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Curve:
    """A claim over the fitted unknown under one setting, straight between simulated points."""

    claim: Claim
    target: Target
    setting: Setting
    #: At each of ``Sweeps.grid``, in the claim's unit; NaN where no cell answers.
    values: np.ndarray
    #: Where ours agrees with the paper's.
    holds: np.ndarray


@dataclass(frozen=True)
class Sweeps:
    """All curves, a claim and a setting each."""

    grid: np.ndarray
    #: Which of the grid's values were simulated.
    simulated: tuple[float, ...]
    curves: Mapping[tuple[str, Setting], Curve]

    @property
    def settings(self) -> list[Setting]:
        """Each setting once."""
        return list(dict.fromkeys(setting for _, setting in self.curves))


def sweeps(fit: Fit, claims: Claims, rows: Mapping[str, Sequence[Row]]) -> Sweeps | None:
    """The curves of all claims; ``None`` where a sweep has no records."""
    if any(not rows.get(sweep.matrix) for sweep in fit.sweeps):
        return None
    indexed = [_indexed(sweep, rows[sweep.matrix]) for sweep in fit.sweeps]
    values = _values(fit, indexed)
    shares = values.pop(fit.unknown)
    grid = np.linspace(shares[0], shares[-1], POINTS)
    asked = dict.fromkeys(target.matrix for target in fit.targets)
    by_id = {claim.id: claim for claim in claims.claims}
    curves = {}
    for chosen in product(*values.values()):
        setting = tuple(zip(values, chosen, strict=True))
        at = [{**dict(setting), fit.unknown: share} for share in shares]
        found = {matrix: [_found(indexed, one, matrix) for one in at] for matrix in asked}
        for target in fit.targets:
            claim = by_id[target.claim]
            points = np.array([_value(target, claim, cells) for cells in found[target.matrix]])
            line = np.interp(grid, shares, points)
            held = _holds(line, claim, fit)
            curves[claim.id, setting] = Curve(claim, target, setting, line, held)
    return Sweeps(grid, tuple(shares), curves)


#: Rows by the unknowns that their matrix varies.
_Index = tuple[Sweep, Mapping[tuple[float, ...], Sequence[Row]]]


def _indexed(sweep: Sweep, rows: Sequence[Row]) -> _Index:
    found = defaultdict(list)
    alike = {"matrix": "", "inter_efficiency": None}
    for row in rows:
        key = tuple(_plain(row.settings[name]) for name in sweep.unknowns)
        # Cells are compared across sweeps, whose links have shares of their own.
        found[key].append(replace(row, settings={**row.settings, **alike}))
    return sweep, found


def _plain(value: object) -> float:
    assert isinstance(value, int | float), "an unknown is a number"
    return float(value)


def _values(fit: Fit, indexed: Sequence[_Index]) -> dict[str, list[float]]:
    """What was simulated of each unknown, in the order of the contents."""
    there: dict[str, set[float]] = {name: set() for name in fit.words}
    for sweep, found in indexed:
        for at, name in enumerate(sweep.unknowns.values()):
            there[name] |= {key[at] for key in found}
    return {name: sorted(values) for name, values in there.items()}


def _found(
    indexed: Sequence[_Index], setting: Mapping[str, float], matrix: str | None
) -> list[Row]:
    """The cells of this setting in one sweep, or in all that have unknowns."""
    return [
        row
        for sweep, found in indexed
        if (matrix is None and sweep.unknowns) or sweep.matrix == matrix
        for row in found.get(tuple(setting[name] for name in sweep.unknowns.values()), ())
    ]


def _value(target: Target, claim: Claim, cells: Sequence[Row]) -> float:
    # Where ours is out of memory there is no speed to draw a line to.
    samples = [
        sample
        for sample in target.compute.samples(cells)
        if sample.over is None or sample.row.state == "ok"
    ]
    assert claim.unit is not None, "checked when the claims were read"
    return taken(samples, target.compute.take) * SCALES[claim.unit] if samples else float("nan")


def _holds(values: np.ndarray, claim: Claim, fit: Fit) -> np.ndarray:
    """Where ours is the paper's within the fit's tolerance, or all systems end as it says."""
    if claim.number is None:
        every: np.ndarray = values == 100
        return every
    near: np.ndarray = np.abs(values - claim.number) <= fit.tolerance * abs(claim.number)
    return near

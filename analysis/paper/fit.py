"""Curves over what the paper does not say; one unknown chosen on one number, the rest predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal

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


#: Sets of claims are searched for contradictions up to this size.
TOGETHER = 3
#: How near a curve must come to a number to be said to reach it, as a share of the number.
REACHED = 0.005


@dataclass(frozen=True)
class Prediction:
    """A claim at the fitted setting, and what it would ask for itself."""

    curve: Curve
    kind: Literal["fitted", "predicted"]
    ours: float
    holds: bool
    #: The value of the unknown with which ours is the paper's; ``None`` where no value gives it.
    asks: float | None


@dataclass(frozen=True)
class Region:
    """Values of the unknown, under one setting, with which the most claims hold together."""

    setting: Setting
    between: tuple[float, float]
    #: At the middle of them.
    holding: Mapping[str, bool]

    @property
    def count(self) -> int:
        """How many claims hold."""
        return sum(self.holding.values())


@dataclass(frozen=True)
class Fitted:
    """All that the fit says."""

    fit: Fit
    #: All of a setting but the fitted unknown, as assumed.
    assumed: Setting
    #: What was chosen.
    value: float
    predictions: tuple[Prediction, ...]
    #: The smallest sets of up to ``TOGETHER`` claims that no simulated setting satisfies together.
    contradictions: tuple[tuple[Claim, ...], ...]
    best: Region

    @property
    def held_out(self) -> tuple[Prediction, ...]:
        """What was predicted."""
        return tuple(item for item in self.predictions if item.kind == "predicted")


def fitted(fit: Fit, sweeps: Sweeps) -> Fitted:
    """Choose the unknown under the assumed setting; ``ValueError`` if no value gives the number."""
    assumed = _assumed(fit, sweeps)
    curves = {target.claim: sweeps.curves[target.claim, assumed] for target in fit.targets}
    value = _asked(sweeps.grid, curves[fit.fitted])
    if value is None:
        raise ValueError(f"fit: no {fit.unknown} gives {fit.fitted} under what is assumed")
    at = int(np.abs(sweeps.grid - value).argmin())
    predictions = tuple(
        Prediction(
            curve,
            "fitted" if name == fit.fitted else "predicted",
            float(curve.values[at]),
            bool(curve.holds[at]),
            None if curve.claim.number is None else _asked(sweeps.grid, curve),
        )
        for name, curve in curves.items()
    )
    holds = _holding(fit, sweeps)
    return Fitted(
        fit,
        assumed,
        value,
        predictions,
        tuple(tuple(curves[name].claim for name in names) for names in _contradicting(holds)),
        _best(sweeps, holds),
    )


def moved(fit: Fit, sweeps: Sweeps, value: float) -> list[tuple[Setting, str, Sequence[float]]]:
    """Each claim under the assumed setting with one assumption changed at a time.

    The setting, the claim, and its number at the fitted value of the unknown.
    """
    assumed = dict(_assumed(fit, sweeps))
    at = int(np.abs(sweeps.grid - value).argmin())
    found: list[tuple[Setting, str, Sequence[float]]] = []
    for setting in sweeps.settings:
        changed = [name for name, chosen in setting if chosen != assumed[name]]
        if len(changed) <= 1:
            values = [
                float(sweeps.curves[target.claim, setting].values[at]) for target in fit.targets
            ]
            found.append((setting, changed[0] if changed else "", values))
    return found


def _assumed(fit: Fit, sweeps: Sweeps) -> Setting:
    for setting in sweeps.settings:
        if dict(setting) == fit.assumed:
            return setting
    there = {name: sorted({dict(s)[name] for s in sweeps.settings}) for name in fit.assumed}
    raise ValueError(f"fit.assumed = {fit.assumed}: was not simulated; allowed are {there}")


def _asked(grid: np.ndarray, curve: Curve) -> float | None:
    """The value of the unknown with which a claim's number comes out."""
    number = curve.claim.number
    assert number is not None, "a number is fitted"
    away = np.abs(curve.values - number)
    # What the unknown does not move asks for none.
    if np.isnan(away).all() or np.nanmin(curve.values) == np.nanmax(curve.values):
        return None
    if np.nanmin(away) > REACHED * abs(number):
        return None
    return float(grid[int(np.nanargmin(away))])


def _holding(fit: Fit, sweeps: Sweeps) -> dict[str, np.ndarray]:
    """Of each claim: a row per setting, a column per value of the unknown."""
    return {
        target.claim: np.stack(
            [sweeps.curves[target.claim, setting].holds for setting in sweeps.settings]
        )
        for target in fit.targets
    }


def _contradicting(holds: Mapping[str, np.ndarray]) -> list[tuple[str, ...]]:
    """Sets of claims that hold nowhere together, without those that contain such a set."""
    found: list[tuple[str, ...]] = []
    for size in range(1, TOGETHER + 1):
        for names in combinations(holds, size):
            known = any(set(smaller) <= set(names) for smaller in found)
            if not known and not np.logical_and.reduce([holds[name] for name in names]).any():
                found.append(names)
    return found


def _best(sweeps: Sweeps, holds: Mapping[str, np.ndarray]) -> Region:
    """The first of the widest stretches in which the most claims hold."""
    count = np.sum(list(holds.values()), axis=0)
    most, widest = int(count.max()), (0, 0, 0)
    for row, counts in enumerate(count):
        for start, end in _stretches(counts == most):
            if end - start > widest[2] - widest[1]:
                widest = row, start, end
    row, start, end = widest
    middle = (start + end) // 2
    return Region(
        sweeps.settings[row],
        (float(sweeps.grid[start]), float(sweeps.grid[end - 1])),
        {name: bool(held[row, middle]) for name, held in holds.items()},
    )


def _stretches(where: np.ndarray) -> list[tuple[int, int]]:
    """Where it is true, from and to, the end not included."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], where.astype(int), [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

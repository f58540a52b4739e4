"""The fit in words and tables: each number that stands in them is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis import text
from analysis.claims.papers import Claim
from analysis.claims.verdicts import quoted, rounded
from analysis.paper.contents import Fit
from analysis.paper.fit import Fitted, Region, Setting, Sweeps, moved
from analysis.paper.region import in_words
from analysis.paper.tables import Table

#: Marks a number that is the paper's within the fit's tolerance.
HOLDS = "✓"
#: Shares, which are written in per cent.
_SHARES = {"share", "slow_share", "recomputed"}


def value(name: str, number: float) -> str:
    """The value of an unknown."""
    return f"{number * 100:.3g} %" if name in _SHARES else f"{number:g}"


def setting(fit: Fit, chosen: Setting | Mapping[str, float]) -> str:
    """A setting, such as ``tokens per sequence 512, micro-batch of LoRA 8``."""
    return ", ".join(f"{fit.words[name]} {value(name, at)}" for name, at in dict(chosen).items())


def paper_number(claim: Claim) -> str:
    """The paper's number with its label; a claim without one is about how systems end."""
    return f"{quoted(claim.number, claim.unit)} [{claim.label}]"


def ours(claim: Claim, number: float) -> str:
    """Our number; of systems that end as the paper says, how many do."""
    return text.ABSENT if np.isnan(number) else rounded(number, claim.unit)


def predictions(found: Fitted) -> Table:
    """The fitted number and all that it predicts."""
    fit = found.fit
    rows = []
    for item in found.predictions:
        claim = item.curve.claim
        agrees = "agrees" if item.holds else "differs"
        rows.append(
            (
                item.curve.target.short,
                paper_number(claim),
                ours(claim, item.ours),
                text.ABSENT if item.kind == "fitted" else _away(claim, item.ours),
                "*fitted*" if item.kind == "fitted" else agrees,
                text.ABSENT if item.asks is None else value(fit.unknown, item.asks),
            )
        )
    at = value(fit.unknown, found.value)
    columns = ("Number", "Paper", f"Ours at {at}", "Off by", "Verdict", "Share it asks for itself")
    return Table("fit", "One number fitted, the others predicted", columns, tuple(rows))


def _away(claim: Claim, number: float) -> str:
    if claim.number is None or np.isnan(number):
        return text.ABSENT
    return f"{100 * (number / claim.number - 1):+.1f} %"


def changes(found: Fitted, sweeps: Sweeps) -> Table:
    """One assumption changed at a time, at the fitted share."""
    fit = found.fit
    rows = []
    at = int(np.abs(sweeps.grid - found.value).argmin())
    for chosen, changed, numbers in moved(fit, sweeps, found.value):
        what = f"{fit.words[changed]} {value(changed, dict(chosen)[changed])}" if changed else ""
        curves = [sweeps.curves[target.claim, chosen] for target in fit.targets]
        values = [
            ours(curve.claim, number) + (f" {HOLDS}" if curve.holds[at] else "")
            for curve, number in zip(curves, numbers, strict=True)
        ]
        rows.append((bool(changed), (what or "as assumed", *values)))
    rows.sort(key=lambda row: row[0])
    columns = ("Changed", *(target.short for target in fit.targets))
    return Table(
        "changes", "One assumption changed at a time", columns, tuple(row for _, row in rows)
    )


def contradictions(found: Fitted) -> list[str]:
    """A line per set of numbers that no simulated setting satisfies together."""
    shorts = {target.claim: target.short for target in found.fit.targets}
    return [
        " against ".join(
            f"{shorts[claim.id]} ({quoted(claim.number, claim.unit)})"
            if claim.number is not None
            else shorts[claim.id]
            for claim in claims
        )
        for claims in found.contradictions
    ]


def best(found: Fitted) -> dict[str, str]:
    """The setting with which the most numbers hold, and which do not."""
    region: Region = found.best
    shorts = {target.claim: target.short for target in found.fit.targets}
    missing = [shorts[name] for name, holds in region.holding.items() if not holds]
    low, high = (value(found.fit.unknown, end) for end in region.between)
    return {
        "count": str(region.count),
        "of": str(len(region.holding)),
        "between": f"{low} to {high}",
        "setting": setting(found.fit, region.setting),
        "missing": ", ".join(missing),
        "found": in_words(),
    }


def as_predicted(found: Fitted | None) -> Mapping[str, str]:
    """By claim, what the fit says of it."""
    if found is None:
        return {}
    return {
        item.curve.claim.id: ours(item.curve.claim, item.ours)
        + (" *fitted*" if item.kind == "fitted" else "")
        for item in found.predictions
    }


def distinct(words: Sequence[str]) -> str:
    """Each once, in order."""
    return ", ".join(dict.fromkeys(words))

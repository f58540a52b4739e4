"""The papers' claims, and the checks that test them.

``claims.yaml`` is the one place where papers' numbers are written down. A mistake in it raises
``ValueError`` naming the file, the line, the claim, the key and what is allowed.
"""

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from analysis.claims.computations import SCALES, Cause, Computation, Unit, setting_of
from analysis.load import matrices
from experiments.records.cell import MatrixName
from simulation import yaml_lines
from simulation.files import Name, Strict
from simulation.yaml_lines import Document, KeyPath

CLAIMS = Path(__file__).parents[1] / "claims.yaml"

#: How well a paper's number is known.
Label = Literal["text", "code", "2nd", "derived", "recalled", "measured"]
LABELS: dict[Label, str] = {
    "text": "read in the paper's own text (abstract, README, figure)",
    "code": "read in the authors' released source",
    "2nd": "read in a third party's note that quotes the paper; not checked against it",
    "derived": "worked out by this project from the paper's definitions",
    "recalled": "unverified memory; a hypothesis",
    "measured": "measured earlier by this project, with a throw-away prototype",
}


class Paper(Strict):
    """A paper, and the reason why claims are untested that give none themselves."""

    title: str
    arxiv: str = Field(pattern=r"^\d{4}\.\d{5}$")
    untested: str | None = None


class MatrixUse(Strict):
    """A matrix that tests claims: its command, and what a run takes where no record says it."""

    command: str | None = None
    resources: str | None = None
    #: Uses that its records must not be put to.
    caveat: str | None = None
    #: Note on its times where they are used.
    noise: str | None = None


class Tolerance(Strict):
    """The allowed distance from the paper's number: one of three, bounds in the claim's unit."""

    relative: float | None = Field(default=None, ge=0)
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _has_exactly_one(self) -> "Tolerance":
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("must have exactly one of relative, at_least, at_most")
        return self

    def admits(self, ours: float, paper: float | None) -> bool:
        """Whether our number is within the tolerance; both are in the claim's unit."""
        least, most = self._ends(paper)
        return least <= ours <= most

    def decides(self, interval: tuple[float, float], paper: float | None) -> bool:
        """Whether an interval lies wholly within the tolerance, or wholly outside of it."""
        (low, high), (least, most) = interval, self._ends(paper)
        return (least <= low and high <= most) or high < least or low > most

    def _ends(self, paper: float | None) -> tuple[float, float]:
        if self.relative is None:
            least, most = self.at_least, self.at_most
            return -inf if least is None else least, inf if most is None else most
        assert paper is not None, "checked when the claim was read"
        away = self.relative * abs(paper)
        return paper - away, paper + away


#: Purpose of a comparison. ``result``: has the claim's own setting, and decides; no other role
#: counts towards the verdict. ``context``: another setting than the claim's. ``set-up``: a number
#: that was set so that other comparisons are fair. ``consistency``: the project's measurements or
#: formulas against themselves. ``fit``: a constant of ours was chosen so that the number comes out.
Role = Literal["result", "context", "set-up", "consistency", "fit"]


class Check(Strict):
    """A comparison of a matrix's records with a claim."""

    matrix: MatrixName
    role: Role = "result"
    compute: Computation
    tolerance: Tolerance
    #: Note on the comparison, whatever the verdict.
    note: str | None = None
    #: The reason for a difference; shown only where the claim is indeed not reproduced.
    because: str | None = None
    #: Settings whose part in the difference is computed from records; shown with the reason.
    causes: tuple[Cause, ...] = ()


class Claim(Strict):
    """One claim of one paper."""

    id: Name
    paper: str
    #: The part of the paper or, where that is not known, of what quotes it.
    where: str
    claim: str
    label: Label
    number: float | None = None
    unit: Unit | None = None
    checks: tuple[Check, ...] = ()
    #: Tests, by pytest's node ids, that show it where no record could: a definition, or an order of
    #: events inside a step.
    shown_by: tuple[str, ...] = ()
    #: The reason why no record tests it; by default that of its paper.
    untested: str | None = None
    #: Machines that a test would take, such as ``128 A100``.
    needs: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> "Claim":
        if self.number is not None and self.unit is None:
            raise ValueError(f"unit is missing; allowed are {', '.join(SCALES)} and others")
        for check in self.checks:
            if self.unit not in check.compute.units:
                raise ValueError(
                    f"unit {self.unit!r} does not fit a check of kind {check.compute.kind}; "
                    f"allowed: {', '.join(check.compute.units)}"
                )
            if check.tolerance.relative is not None and self.number is None:
                raise ValueError("a relative tolerance needs a number")
            # A bound in per cent, 99 for 0.99, is a mistake.
            for bound in (check.tolerance.at_least, check.tolerance.at_most):
                if self.unit == "×" and bound is not None and bound > 10 * (self.number or 1):
                    raise ValueError(
                        f"{bound:g}×: allowed are bounds up to 10 × {self.number or 1:g}"
                    )
        return self


class Claims(Strict):
    """The contents of ``claims.yaml``."""

    papers: dict[Name, Paper]
    matrices: dict[MatrixName, MatrixUse]
    claims: tuple[Claim, ...]

    def command(self, matrix: str) -> str:
        """The command that runs a matrix."""
        use = self.matrices.get(matrix)
        return (use.command if use else None) or f"python -m experiments run {matrix}"


def load(path: Path = CLAIMS) -> Claims:
    """Read and check the claims; ``ValueError`` as said above, ``OSError`` without a file."""
    document = yaml_lines.load(path)
    try:
        claims = Claims.model_validate(document.values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(_message(document, first["loc"], first["msg"])) from error
    for place, problem in _mistakes(claims):
        raise ValueError(_message(document, place, problem))
    return claims


def _mistakes(claims: Claims) -> Iterator[tuple[KeyPath, str]]:
    """Places and problems that take more than one claim to see."""

    def no_matrix(name: str) -> str:
        return f"{name!r} is no matrix; allowed are {', '.join(claims.matrices)}"

    seen: set[str] = set()
    existing = matrices.named()
    for name, use in claims.matrices.items():
        if name not in existing and use.command is None:
            there = ", ".join(existing)
            yield ("matrices", name), f"no such matrix, and no command; there are {there}"
    for at, claim in enumerate(claims.claims):
        place = ("claims", at)
        if claim.id in seen:
            yield (*place, "id"), f"{claim.id!r} is there already; ids are unique"
        seen.add(claim.id)
        if claim.paper not in claims.papers:
            allowed = ", ".join(claims.papers)
            yield (*place, "paper"), f"{claim.paper!r}: allowed are {allowed}"
        elif not (claim.checks or claim.untested or claims.papers[claim.paper].untested):
            yield place, "has neither checks nor a reason why it is untested"
        for index, check in enumerate(claim.checks):
            where = (*place, "checks", index)
            if check.matrix not in claims.matrices:
                yield (*where, "matrix"), no_matrix(check.matrix)
            for key, problem in _unknown_names(check):
                yield (*where, "compute", *key), problem
            for number, cause in enumerate(check.causes):
                if cause.matrix not in claims.matrices:
                    yield (*where, "causes", number, "matrix"), no_matrix(cause.matrix)
                try:
                    setting_of(cause)
                except ValueError as error:
                    yield (*where, "causes", number, "setting"), str(error)


def _unknown_names(check: Check) -> Iterator[tuple[KeyPath, str]]:
    """Names in a selection that no cell of the check's matrix has."""
    known = matrices.names(check.matrix)
    for part in ("of", "over"):
        selection = getattr(check.compute, part, None)
        for setting, allowed in known.items():
            name = getattr(selection, setting, None)
            if name is not None and name not in allowed:
                there = ", ".join(sorted(allowed))
                problem = f"{name!r} is not in the matrix {check.matrix}; allowed are {there}"
                yield (part, setting), problem


def _message(document: Document, place: Sequence[str | int], problem: str) -> str:
    """One line: file, line, claim and key, and the problem."""
    where = ".".join(str(part) for part in place)
    if len(place) > 1 and place[0] == "claims":
        of = document.values["claims"][place[1]]
        where += f" ({of['id']})" if isinstance(of, dict) and "id" in of else ""
    problem = problem.removeprefix("Value error, ")
    return f"{document.file}:{document.line(place)}: {where}: {problem}"

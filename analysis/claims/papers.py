"""The papers' claims, this project's hypotheses beside them, and the checks that test both.

``claims.yaml`` is the one place where these numbers are written down. A mistake in it raises
``ValueError`` naming the file, the line, the claim, the key and what is allowed.
"""

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from analysis.claims.computations import SCALES, Computation, Measure
from analysis.load import matrices
from experiments.records.cell import MatrixName
from simulation import yaml_lines
from simulation.files import Name, Strict
from simulation.yaml_lines import Document, KeyPath

CLAIMS = Path(__file__).parents[1] / "claims.yaml"

#: Where a number comes from. A paper gives the first two; the last three are hypotheses, for no
#: paper gives them. What the authors' released source shows is a claim if it is a number or a rule
#: of the paper's method, and else a hypothesis.
Label = Literal["text", "2nd", "code", "derived", "recalled", "measured"]
LABELS: dict[Label, str] = {
    "text": "read in the paper's own text (abstract, README, figure)",
    "2nd": "read in a third party's note that quotes the paper; not checked against the paper",
    "code": "read in the authors' released source, or in data that they released",
    "derived": "worked out by this project from the paper's definitions",
    "recalled": "remembered, and not verified",
    "measured": "measured earlier by this project, with a throw-away prototype",
}
_OF_PAPERS: tuple[Label, ...] = ("text", "2nd", "code")
_OF_HYPOTHESES: tuple[Label, ...] = ("code", "derived", "recalled", "measured")


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


#: Part that a comparison has in the verdict. ``result``: it is of the claim's own setting, and
#: counts. ``context``: it is of another setting, and does not count. ``fit``: it does not count
#: either, because a constant of ours was chosen so that the number comes out.
Role = Literal["result", "context", "fit"]


class Check(Strict):
    """A comparison of a matrix's records with a claim."""

    matrix: MatrixName
    role: Role = "result"
    compute: Computation
    tolerance: Tolerance
    #: Note on the comparison, whatever the verdict.
    note: str | None = None
    #: The reason for a difference; shown only where our number is indeed not near enough.
    because: str | None = None


class Claim(Strict):
    """One claim of one paper, or one hypothesis on what a paper describes."""

    id: Name
    paper: str
    #: The part of the paper or, where that is not known, of what quotes it.
    where: str
    claim: str
    label: Label
    number: float | None = None
    unit: Measure | None = None
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
    #: Claims of the papers.
    claims: tuple[Claim, ...]
    #: Numbers that no paper gives: compared with records as claims are, without a verdict.
    hypotheses: tuple[Claim, ...] = ()

    @property
    def every(self) -> tuple[Claim, ...]:
        """The claims, and the hypotheses after them."""
        return (*self.claims, *self.hypotheses)

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
    existing = matrices.named()
    for name, use in claims.matrices.items():
        if name not in existing and use.command is None:
            there = ", ".join(existing)
            yield ("matrices", name), f"no such matrix, and no command; there are {there}"
    seen: set[str] = set()
    lists = {"claims": _OF_PAPERS, "hypotheses": _OF_HYPOTHESES}
    for name, labels in lists.items():
        for at, claim in enumerate(getattr(claims, name)):
            if claim.id in seen:
                yield (name, at, "id"), f"{claim.id!r} is there already; ids are unique"
            seen.add(claim.id)
            if claim.label not in labels:
                allowed = ", ".join(labels)
                yield (name, at, "label"), f"{claim.label!r}: allowed in {name} are {allowed}"
            for key, problem in _mistakes_of(claims, claim):
                yield (name, at, *key), problem


def _mistakes_of(claims: Claims, claim: Claim) -> Iterator[tuple[KeyPath, str]]:
    """Places in one claim, and their problems."""
    if claim.paper not in claims.papers:
        yield ("paper",), f"{claim.paper!r}: allowed are {', '.join(claims.papers)}"
    elif not (claim.checks or claim.untested or claims.papers[claim.paper].untested):
        yield (), "has neither checks nor a reason why it is untested"
    for index, check in enumerate(claim.checks):
        if check.matrix not in claims.matrices:
            there = ", ".join(claims.matrices)
            problem = f"{check.matrix!r} is no matrix; allowed are {there}"
            yield ("checks", index, "matrix"), problem
        for key, problem in _unknown_names(check):
            yield ("checks", index, "compute", *key), problem


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
    if len(place) > 1 and place[0] in ("claims", "hypotheses"):
        of = document.values[place[0]][place[1]]
        where += f" ({of['id']})" if isinstance(of, dict) and "id" in of else ""
    problem = problem.removeprefix("Value error, ")
    return f"{document.file}:{document.line(place)}: {where}: {problem}"

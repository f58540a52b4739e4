"""The chapter on a paper: a row per result first, then a section per table or figure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import text
from analysis.claims.papers import Claim, Claims
from analysis.claims.verdicts import Finding, Summary, between, labelled, rounded
from analysis.figures.drawings import Drawing
from analysis.load.runs import AnyRun, Run
from analysis.paper import figures, tables
from analysis.paper.contents import Contents, Section
from analysis.paper.region import Region, in_words
from analysis.paper.tables import Table
from experiments.records.workload import AnyModel, Images
from simulation.bound import BoundRecord
from simulation.transformer import ModelSpec

#: Matrix of the emulated comparison that a table shows: the one at the paper's ratio of
#: communication to computation, if there is one.
_SAME_RATIO = "paper-emulated"
#: The column of simulated numbers over all that the paper leaves open.
_RANGED = "The paper's system, over its unknowns"


@dataclass(frozen=True)
class Part:
    """A section as documents show it."""

    section: Section
    table: Table
    #: Its notes, by id.
    notes: Mapping[str, str]
    pivots: tuple[Table, ...]
    assumptions: str
    commands: tuple[str, ...]
    drawing: Drawing | None
    #: The ids of notes that stand in earlier sections of a document, which has each note once.
    earlier: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """A chapter as documents show it."""

    #: The paper, as the claims call it.
    paper: str
    #: A row per result: what, paper, simulated, emulated, verdict, why, and its section's id.
    opening: tuple[tuple[str, ...], ...]
    parts: tuple[Part, ...]
    #: How many of the paper's numbers hold together at the best point, in words; empty without one.
    together: str = ""
    #: Tables of these numbers, and of that point.
    tables: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = ()

    @property
    def drawn(self) -> list[Drawing]:
        """Every figure."""
        of_parts = [part.drawing for part in self.parts if part.drawing is not None]
        return of_parts + list(self.drawings)


def chapter(
    holds: Contents,
    claims: Claims,
    runs: Sequence[AnyRun],
    findings: Sequence[Finding],
    verdicts: Mapping[str, Summary],
    number: Mapping[str, str],
    of: Region | None = None,
) -> Chapter:
    """The chapter of these records.

    ``number`` has each note's id, ``of`` the region in which the paper's numbers hold together.
    """
    by_matrix = {run.matrix: run for run in runs}
    shown = _Shown(claims, findings, verdicts, of)
    sized = set[str]()
    parts = tuple(
        Part(
            section,
            shown.table(section),
            {number[note]: note for note in shown.notes(section) if note in number},
            _own_tables(section, by_matrix),
            _assumptions(section, by_matrix, sized),
            tuple(map(claims.command, section.matrices)),
            _drawing(section, shown, by_matrix),
        )
        for section in holds.sections
    )
    opening = tuple(
        (short, *shown.row(name, briefly=True)[1:], shown.why(section, name), section.id)
        for section in holds.sections
        for name, short in section.first.items()
    )
    if of is None:
        return Chapter(holds.paper, opening, parts)
    first = {name: short for section in holds.sections for name, short in section.first.items()}
    numbers = [shown.of(name) for name in of.holds.numbers]
    return Chapter(
        holds.paper,
        opening,
        parts,
        in_words(of.holds, of.points, of.paper),
        (_together(numbers, first, of), _point(of)),
        (figures.ranges("paper-region", "All numbers", numbers, of, first),),
    )


def _together(numbers: Sequence[Claim], first: Mapping[str, str], of: Region) -> Table:
    best = {name: ranged.best for name, ranged in of.ranges.items()}
    far = {name: ", too far" * (of.paper[name].away(at) > 1) for name, at in best.items()}
    columns = {
        "Number": [first.get(c.id, c.claim) for c in numbers],
        "Paper": [*map(labelled, numbers)],
        "At the best point": [rounded(best[c.id], c.unit) + far[c.id] for c in numbers],
    }
    return Table("together", "The paper's numbers together", pd.DataFrame(columns))


def _point(of: Region) -> Table:
    """The best point: the values that the paper leaves open, there and in their ranges."""
    best, unknowns = of.points.best.point, of.holds.unknowns
    columns = {
        "What the paper does not say": [unknown.words for unknown in unknowns.values()],
        "At the best point": [unknown.written(best[name]) for name, unknown in unknowns.items()],
        "May be": [unknown.range for unknown in unknowns.values()],
    }
    return Table("point", "The best point", pd.DataFrame(columns))


def _own_tables(section: Section, runs: Mapping[str, AnyRun]) -> tuple[Table, ...]:
    """Tables of a section's matrices, cell by cell."""
    pivots = [tables.pivoted(p, runs[p.matrix].rows) for p in section.pivots if p.matrix in runs]
    for seeds in section.seeds:
        run = runs.get(seeds.matrix)
        pivots += [tables.over_seeds(seeds, run)] if isinstance(run, Run) else []
    return tuple(pivots)


@dataclass(frozen=True)
class _Shown:
    """Claims and their findings, as cells of tables."""

    claims: Claims
    findings: Sequence[Finding]
    verdicts: Mapping[str, Summary]
    region: Region | None

    def of(self, name: str) -> Claim:
        return next(claim for claim in self.claims.claims if claim.id == name)

    def table(self, section: Section) -> Table:
        ranges = self.region.ranges if self.region else {}
        names = ("Result", "Paper", "Simulated", "Emulated", "Verdict")
        frame = pd.DataFrame([self.row(name) for name in section.claims], columns=names)
        frame[_RANGED] = [
            ranges[name].span(self.of(name).unit) if name in ranges else text.ABSENT
            for name in section.claims
        ]
        # A column in which no claim has a value is left out.
        some = [name for name in ("Simulated", _RANGED) if (frame[name] != text.ABSENT).any()]
        order = ["Result", "Verdict", "Paper", *some, "Emulated"]
        return Table(section.id, section.title, frame[order])

    def row(self, name: str, briefly: bool = False) -> tuple[str, str, str, str, str]:
        """Result, paper, simulated, emulated, verdict; briefly without intervals."""
        claim, verdict = self.of(name), str(self.verdicts[name])
        if verdict == "not judged":
            verdict = next(f.verdict for f in self._findings_of(name) if not f.decides)
        simulated, emulated = (
            self._ours(claim, kind, briefly) for kind in ("simulated", "emulated")
        )
        return claim.claim, labelled(claim), simulated, emulated, verdict

    def _findings_of(self, name: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.claim.id == name]

    def _ours(self, claim: Claim, evidence: str, briefly: bool) -> str:
        """Our number by this evidence: one that decides, else at the paper's ratio, else any."""
        findings = [f for f in self._findings_of(claim.id) if f.evidence == evidence]
        if not findings:
            return text.ABSENT
        finding = min(
            findings,
            key=lambda f: (not f.decides, not (f.check and f.check.matrix.startswith(_SAME_RATIO))),
        )
        ours, sure = rounded(finding.ours, claim.unit), between(finding.interval, claim.unit)
        notes = [sure] if sure and not briefly else []
        notes += ["undecided"] if finding.verdict == "undecided" else []
        return f"{ours} ({'; '.join(notes)})" if notes else ours

    def why(self, section: Section, name: str) -> str:
        """A clause on the verdict: over the range, the reason found, or the section's."""
        claim, ranged = self.of(name), self.region.ranges.get(name) if self.region else None
        if ranged is not None:
            how = f"by what is not said; {100 * ranged.share:.0f} of 100 cases agree"
            if ranged.share == 1:
                how = "whatever is not said"
            if ranged.fitted:
                how = "which was read from it"
            return f"{ranged.span(claim.unit)} by the paper's system, {how}"
        findings = self._findings_of(name)
        finding = next((f for f in findings if f.decides), findings[0])
        because = finding.check.because if finding.check else None
        if because and finding.verdict == "not reproduced":
            return because.split(". ")[0].rstrip(".")
        agrees = finding.verdict in ("reproduced", "as stated", "consistent")
        return section.because.get(name, finding.cells) if agrees else finding.cells

    def notes(self, section: Section) -> list[str]:
        """The reasons of findings that decide the section's claims; of all where none does."""
        decided = {finding.claim.id for finding in self.findings if finding.decides}
        return [
            reason
            for finding in self.findings
            if finding.claim.id in section.claims
            and (finding.decides or finding.claim.id not in decided)
            for reason in finding.reasons
        ]


def _assumptions(section: Section, runs: Mapping[str, AnyRun], sized: set[str]) -> str:
    """Models, length, recomputation and share of the link of the section's cells.

    A model is given with its dimensions unless it is in ``sized``, which has earlier models.
    """
    cells = [
        record.cell
        for name in section.matrices
        if isinstance(run := runs.get(name), Run)
        for record in run.records
    ]
    texts = [c for c in cells if not isinstance(c.data, Images)]
    parts = [
        [_sized(c.model, sized) for c in cells],
        [f"{c.cluster.nodes} nodes × {c.cluster.ranks_per_node} ranks" for c in cells],
        [f"{c.sequence_length} tokens per sequence" for c in texts],
    ]
    assumptions = [words for part in parts if (words := _distinct(part))]
    sized |= {c.model.name for c in cells}
    simulated = [c.cluster for c in cells if c.cluster.kind == "simulated"]
    if simulated:
        shares = _distinct([f"{c.link_efficiency * 100:g} %" for c in simulated])
        again = _distinct([f"{c.recomputed * 100:g} %" for c in cells])
        assumptions += [f"{again} of the blocks recomputed", f"{shares} of each link reached"]
    return "; ".join(assumptions)


def _sized(model: AnyModel, sized: Collection[str]) -> str:
    """A model and, where it is one of the built-in ones, its dimensions."""
    if model.name in sized or not isinstance(model, ModelSpec):
        return model.name
    return f"{model.name} ({model.layers} blocks of width {model.width})"


def _drawing(section: Section, shown: _Shown, runs: Mapping[str, AnyRun]) -> Drawing | None:
    """The section's figure; ``None`` without its records."""
    if section.figure == "ranges":
        drawn = [shown.of(name) for name in section.first]
        if shown.region is None:
            return None
        return figures.ranges(
            f"paper-{section.id}", section.title, drawn, shown.region, section.first
        )
    run, claims = runs.get(section.matrices[0]), [shown.of(name) for name in section.claims]
    if isinstance(run, Run):
        if section.figure in ("throughput", "traffic", "intervals", "slots"):
            return figures.of_kind(run, section.figure)
        arguments = (claims, run) if section.figure in ("volume", "bandwidth") else (run,)
        return getattr(figures, section.figure)(*arguments)  # type: ignore[no-any-return]
    points = [r for r in (run.records if run else ()) if isinstance(r, BoundRecord)]
    return figures.bound(claims, points, run.summary) if run and points else None


def _distinct(words: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(words))

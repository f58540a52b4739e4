"""The chapter on a paper: a row per result first, then a section per table or figure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from analysis import text
from analysis.claims.papers import Claim, Claims
from analysis.claims.verdicts import Finding, Summary, between, quoted, rounded
from analysis.figures.drawings import Drawing
from analysis.load.runs import AnyRun, BoundStudy, Run
from analysis.paper import figures, tables
from analysis.paper.contents import Contents, Section
from analysis.paper.region import Region, in_words
from analysis.paper.tables import Table
from experiments.records.workload import AnyModel, Images
from simulation.transformer import ModelSpec

#: Matrix of the emulated comparison that a table shows: the one at the paper's ratio of
#: communication to computation, if there is one.
_SAME_RATIO = "paper-emulated"


@dataclass(frozen=True)
class Part:
    """A section as documents show it."""

    section: Section
    table: Table
    #: Notes that stand here, by id, and the ids of those that stand in earlier sections;
    #: a document has each note once.
    notes: Mapping[str, str]
    earlier: tuple[str, ...]
    pivots: tuple[Table, ...]
    assumptions: str
    commands: tuple[str, ...]
    drawing: Drawing | None


@dataclass(frozen=True)
class Chapter:
    """All of it."""

    #: The paper, as the claims call it.
    paper: str
    #: A row per result: what, paper, simulated, emulated, verdict, why, and its section's id.
    opening: tuple[tuple[str, ...], ...]
    parts: tuple[Part, ...]
    #: At which point the paper's numbers hold together, in words; nothing of papers without one.
    together: str = ""
    #: Each of them there, and that point.
    tables: tuple[Table, ...] = ()
    drawings: tuple[Drawing, ...] = ()

    @property
    def drawn(self) -> list[Drawing]:
        """Every figure."""
        own = [part.drawing for part in self.parts if part.drawing is not None]
        return own + list(self.drawings)

    @property
    def written(self) -> list[Table]:
        """Every table, for CSV and LaTeX."""
        own = [table for part in self.parts for table in (part.table, *part.pivots)]
        return own + list(self.tables)

    @property
    def noted(self) -> set[str]:
        """The notes that stand in its sections, by id."""
        return {at for part in self.parts for at in part.notes}


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

    ``number`` has each note's id, and ``of`` where the paper's numbers hold together.
    """
    by_matrix = {run.matrix: run for run in runs}
    shown = _Shown(claims, findings, verdicts, of)
    notes = _placed(holds.sections, shown, number)
    sized = set[str]()
    parts = tuple(
        Part(
            section,
            shown.table(section),
            own,
            earlier,
            _own_tables(section, by_matrix),
            _assumptions(section, by_matrix, sized),
            tuple(map(claims.command, section.matrices)),
            _drawing(section, shown, by_matrix),
        )
        for section, (own, earlier) in zip(holds.sections, notes, strict=True)
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
        in_words(of.holds, of.found, of.paper),
        (_together(numbers, first, of), _point(of)),
        (figures.ranges("paper-region", "All numbers", numbers, of, first),),
    )


def _together(numbers: Sequence[Claim], first: Mapping[str, str], of: Region) -> Table:
    rows = []
    for claim in numbers:
        found, asks = of.ranges[claim.id], of.paper[claim.id]
        near = "" if asks.away(found.best) <= 1 else ", too far"
        rows.append(
            (
                first.get(claim.id, claim.claim),
                f"{quoted(claim.number, claim.unit)} [{claim.label}]",
                f"{rounded(found.best, claim.unit)}{near}",
            )
        )
    columns = ("Number", "Paper", "At the best point")
    return Table("together", "The paper's numbers together", columns, tuple(rows))


def _point(of: Region) -> Table:
    """The point that the paper leaves open: where its numbers hold together, and its ranges."""
    best, every = of.found.best.point, of.holds.unknowns.items()
    rows = tuple((one.words, one.written(best[name]), one.range) for name, one in every)
    columns = ("What the paper does not say", "At the best point", "May be")
    return Table("point", "The best point", columns, rows)


def _own_tables(section: Section, runs: Mapping[str, AnyRun]) -> tuple[Table, ...]:
    """Tables of a section's matrices, cell by cell."""
    found = [tables.pivoted(of, runs[of.matrix].rows) for of in section.pivots if of.matrix in runs]
    for seeds in section.seeds:
        run = runs.get(seeds.matrix)
        found += [tables.over_seeds(seeds, run)] if isinstance(run, Run) else []
    return tuple(found)


def _placed(
    sections: Sequence[Section], shown: _Shown, number: Mapping[str, str]
) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """Notes that stand first in each section, and the ids of the others."""
    there = set[str]()
    found = []
    for section in sections:
        reasons = [note for note in shown.notes(section) if note in number]
        notes = {number[note]: note for note in reasons}
        own = {at: note for at, note in notes.items() if at not in there}
        found.append((own, tuple(at for at in notes if at in there)))
        there |= set(own)
    return found


@dataclass(frozen=True)
class _Shown:
    """Claims and what was found of them, as cells of tables."""

    claims: Claims
    findings: Sequence[Finding]
    verdicts: Mapping[str, Summary]
    region: Region | None

    def of(self, name: str) -> Claim:
        return next(claim for claim in self.claims.claims if claim.id == name)

    def table(self, section: Section) -> Table:
        ranges = self.region.ranges if self.region else {}
        rows = [
            (
                *self.row(name),
                ranges[name].span(self.of(name).unit) if name in ranges else text.ABSENT,
            )
            for name in section.claims
        ]
        # A column that no claim has a value in is left out: simulated numbers, and ranges.
        simulated, ranged = (any(row[at] != text.ABSENT for row in rows) for at in (2, 5))
        order = [0, 4, 1, *([2] if simulated else []), *([5] if ranged else []), 3]
        names = ("Result", "Paper", "Simulated", "Emulated", "Verdict")
        columns = (*names, "The paper's system, over its unknowns")
        return Table(
            section.id,
            section.title,
            tuple(columns[place] for place in order),
            tuple(tuple(row[place] for place in order) for row in rows),
        )

    def row(self, name: str, briefly: bool = False) -> tuple[str, str, str, str, str]:
        """Result, paper, simulated, emulated, verdict; briefly without intervals."""
        claim = self.of(name)
        paper = f"{quoted(claim.number, claim.unit)} [{claim.label}]"
        simulated, emulated = (
            self._ours(claim, kind, briefly) for kind in ("simulated", "emulated")
        )
        verdict = self.verdicts[name]
        apart = [f.verdict for f in self.findings if f.claim.id == name and not f.decides]
        return (
            claim.claim,
            paper,
            simulated,
            emulated,
            (apart[0] if verdict == "not judged" else verdict),
        )

    def _ours(self, claim: Claim, evidence: str, briefly: bool) -> str:
        """Ours by this evidence: what decides, else at the paper's ratio, else the first."""
        found = [f for f in self.findings if f.claim.id == claim.id and f.evidence == evidence]
        found.sort(
            key=lambda f: (not f.decides, not (f.check and f.check.matrix.startswith(_SAME_RATIO)))
        )
        if not found:
            return text.ABSENT
        ours, sure = rounded(found[0].ours, claim.unit), between(found[0].interval, claim.unit)
        said = [sure] if sure and not briefly else []
        said += ["undecided"] if found[0].verdict == "undecided" else []
        return f"{ours} ({'; '.join(said)})" if said else ours

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
        every = [f for f in self.findings if f.claim.id == name]
        finding = next((f for f in every if f.decides), every[0])
        because = finding.check.because if finding.check else None
        if because and finding.verdict == "not reproduced":
            return because.split(". ")[0].rstrip(".")
        agrees = finding.verdict in ("reproduced", "as stated", "consistent")
        return section.because.get(name, finding.cells) if agrees else finding.cells

    def notes(self, section: Section) -> list[str]:
        """The reasons of what decides the section's claims; of all else where nothing does."""
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

    A model has its dimensions where it is not among those that are ``sized`` already.
    """
    cells = [
        record.cell
        for name in section.matrices
        if isinstance(run := runs.get(name), Run)
        for record in run.records
    ]
    models = _distinct([_sized(c.model, sized) for c in cells])
    sized |= {c.model.name for c in cells}
    clusters = _distinct(
        [f"{c.cluster.nodes} nodes × {c.cluster.ranks_per_node} ranks" for c in cells]
    )
    lengths = _distinct(
        [
            f"{c.sequence_length} tokens per sequence"
            for c in cells
            if not isinstance(c.data, Images)
        ]
    )
    parts = [models, clusters, lengths]
    simulated = [c.cluster for c in cells if c.cluster.kind == "simulated"]
    if simulated:
        shares = _distinct([f"{c.link_efficiency * 100:g} %" for c in simulated])
        again = _distinct([f"{c.recomputed * 100:g} %" for c in cells])
        parts += [f"{again} of the blocks recomputed", f"{shares} of each link reached"]
    return "; ".join(part for part in parts if part)


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
    run = runs.get(section.matrices[0])
    if isinstance(run, BoundStudy):
        return figures.bound([shown.of(name) for name in section.claims], run)
    if not isinstance(run, Run):
        return None
    if section.figure in ("throughput", "traffic", "intervals", "slots"):
        return figures.of_kind(run, section.figure)
    claims = [shown.of(name) for name in section.claims]
    if section.figure in ("volume", "bandwidth"):
        return getattr(figures, section.figure)(claims, run)  # type: ignore[no-any-return]
    return getattr(figures, section.figure)(run)  # type: ignore[no-any-return]


def _distinct(words: Sequence[str]) -> str:
    """Each once, in order."""
    return ", ".join(dict.fromkeys(words))

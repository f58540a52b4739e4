"""The chapter on a paper: a row per result first, then a section per table or figure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import text
from analysis.claims.papers import Claim, Claims
from analysis.claims.verdicts import Finding, Judgement, between, cells, labelled, rounded
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
#: The column of simulated numbers over all that the paper leaves open; the template of
#: REPRODUCTION.md says what the paper's system is.
_RANGED = "The paper's system, over its unknowns"


@dataclass(frozen=True)
class Part:
    """A section as documents show it."""

    section: Section
    #: ``None`` where nothing is known of what the paper says.
    table: Table | None
    #: Hypotheses on it, in words.
    hypotheses: tuple[str, ...]
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
    #: A row per claim of ``first``: its short name, the paper's number, simulated, emulated,
    #: verdict, why, and its section's id.
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

    @property
    def written(self) -> list[Table]:
        """The table of each section, for CSV and LaTeX."""
        return [part.table for part in self.parts if part.table is not None]


def chapter(
    holds: Contents,
    claims: Claims,
    runs: Sequence[AnyRun],
    judged: Mapping[str, Judgement],
    number: Mapping[str, str],
    of: Region | None = None,
) -> Chapter:
    """The chapter of these records.

    ``judged`` has each claim's judgement by the claim's id, ``number`` each note's id, ``of`` the
    region in which the paper's numbers hold together.
    """
    by_matrix = {run.matrix: run for run in runs}
    sized = set[str]()
    parts = tuple(
        Part(
            section,
            _table(section, judged),
            tuple(judged[name].claim.claim for name in section.hypotheses),
            {number[note]: note for note in _notes(section, judged)},
            _own_tables(section, by_matrix),
            _assumptions(section, by_matrix, sized),
            tuple(map(claims.command, section.matrices)),
            _drawing(section, judged, of, by_matrix),
        )
        for section in holds.sections
    )
    opening = tuple(
        (short, *_row(judged[name], briefly=True)[1:], _why(section, judged[name]), section.id)
        for section in holds.sections
        for name, short in section.first.items()
        if name in section.claims
    )
    if of is None:
        return Chapter(holds.paper, opening, parts)
    first = {name: short for section in holds.sections for name, short in section.first.items()}
    numbers = [judged[name].claim for name in of.holds.numbers]
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


def _table(section: Section, judged: Mapping[str, Judgement]) -> Table | None:
    """The section's claims, a row for each; ``None`` without any."""
    if not section.claims:
        return None
    of_section = [judged[name] for name in section.claims]
    names = ("Result", "Paper", "Simulated", "Emulated", "Verdict")
    frame = pd.DataFrame(map(_row, of_section), columns=names)
    frame[_RANGED] = [
        of.ranged.span(of.claim.unit) if of.ranged else text.ABSENT for of in of_section
    ]
    # A column in which no claim has a value is left out.
    some = [name for name in ("Simulated", _RANGED) if (frame[name] != text.ABSENT).any()]
    order = ["Result", "Verdict", "Paper", *some, "Emulated"]
    return Table(section.id, section.title, frame[order])


def _row(of: Judgement, briefly: bool = False) -> tuple[str, str, str, str, str]:
    """Result, paper, simulated, emulated, verdict; briefly without intervals."""
    simulated, emulated = (_ours(of, kind, briefly) for kind in ("simulated", "emulated"))
    return of.claim.claim, labelled(of.claim), simulated, emulated, str(of.verdict)


def _why(section: Section, of: Judgement) -> str:
    """A clause on the verdict: over the range, the reason found, or the section's."""
    if of.ranged is not None:
        how = f"{100 * of.ranged.share:.0f} of 100 cases agree"
        if of.ranged.share == 1:
            how = "all cases agree"
        if of.ranged.fitted:
            how = "it was fitted to this number"
        return f"{of.ranged.span(of.claim.unit)} by the paper's system; {how}"
    finding = _counting(of)[0]
    if finding.agrees is False and finding.check.because:
        return finding.check.because.split(". ")[0].rstrip(".")
    if finding.agrees and of.claim.id in section.because:
        return section.because[of.claim.id]
    return cells(finding, of.claim.unit)


def _notes(section: Section, judged: Mapping[str, Judgement]) -> list[str]:
    """Notes on the section's claims, and on the findings that count for them."""
    return [
        note
        for of in map(judged.__getitem__, section.claims)
        for notes in (*(finding.notes for finding in _counting(of)), of.notes)
        for note in notes
    ]


def _counting(of: Judgement) -> list[Finding]:
    """The findings that count for the verdict; all, where none does."""
    results = [finding for finding in of.findings if finding.check.role == "result"]
    return results or list(of.findings)


def _ours(of: Judgement, evidence: str, briefly: bool) -> str:
    """Our number by this evidence: one that counts, else at the paper's ratio, else any."""
    findings = [finding for finding in of.findings if finding.evidence == evidence]
    if not findings:
        return text.ABSENT

    def rank(finding: Finding) -> tuple[bool, bool]:
        check = finding.check
        return check.role != "result", not check.matrix.startswith(_SAME_RATIO)

    finding, unit = min(findings, key=rank), of.claim.unit
    ours, sure = rounded(finding.ours, unit), between(finding.interval, unit)
    notes = [sure] if sure and not briefly else []
    notes += ["undecided"] if finding.agrees is None else []
    return f"{ours} ({'; '.join(notes)})" if notes else ours


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


def _drawing(
    section: Section,
    judged: Mapping[str, Judgement],
    of: Region | None,
    runs: Mapping[str, AnyRun],
) -> Drawing | None:
    """The section's figure; ``None`` without its records."""
    if section.figure == "ranges":
        if of is None:
            return None
        drawn = [judged[name].claim for name in section.first]
        return figures.ranges(f"paper-{section.id}", section.title, drawn, of, section.first)
    run = runs.get(section.matrices[0])
    claims = [judged[name].claim for name in (*section.claims, *section.hypotheses)]
    if isinstance(run, Run):
        if section.figure in ("throughput", "traffic", "intervals", "slots"):
            return figures.of_kind(run, section.figure)
        arguments = (claims, run) if section.figure in ("volume", "bandwidth") else (run,)
        return getattr(figures, section.figure)(*arguments)  # type: ignore[no-any-return]
    points = [r for r in (run.records if run else ()) if isinstance(r, BoundRecord)]
    return figures.bound(claims, points, run.summary) if run and points else None


def _distinct(words: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(words))

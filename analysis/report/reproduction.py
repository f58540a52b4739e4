"""REPRODUCTION.md and the pages beside it: the papers' results next to what the records say."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis import text
from analysis.claims import papers
from analysis.claims.papers import LABELS, Claim, Claims, Role
from analysis.claims.verdicts import (
    VERDICTS,
    Finding,
    Judgement,
    asked,
    cells,
    judge,
    labelled,
    rounded,
)
from analysis.compare import rivals
from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.figures.drawings import svg
from analysis.load import runs
from analysis.load.runs import AnyRun, Run
from analysis.paper import contents
from analysis.paper import tables as papers_tables
from analysis.paper.chapter import Chapter, chapter
from analysis.paper.region import region
from analysis.report import pages, simulator
from simulation.emulated import FITTED_TO


def write(results: Path) -> dict[str, Path]:
    """Write REPRODUCTION.md beside the folder of results, and the rest into it; say where.

    The other papers, every claim, the hypotheses and the records have pages of their own. Beside
    them are the figures, and the table of each section as CSV and LaTeX.

    Raises ``ValueError`` for malformed claims or records, or without any.
    """
    claims, of = papers.load(), runs.load(results)
    root, page = results.resolve().parent, results / "report.html"
    tables, drawings = (results / "paper" / name for name in ("tables", "figures"))
    made = document(claims, of)
    drawings.mkdir(parents=True, exist_ok=True)
    for name, written in made.markdown.items():
        (root / name).write_text(written, encoding="utf-8")
    page.write_text(_page(claims, of, made.values), encoding="utf-8")
    papers_tables.write([table for one in made.chapters for table in one.written], tables)
    for drawing in (drawing for one in made.chapters for drawing in one.drawn):
        (drawings / f"{drawing.name}.svg").write_bytes(svg(drawing))
    return {"claims": root / DOCUMENT, "report": page, "tables": tables, "figures": drawings}


@dataclass(frozen=True)
class Document:
    """The pages, which depend on the claims and the records alone."""

    #: Pages by their files' names, relative to the repository.
    markdown: Mapping[str, str]
    #: The chapter on the FCDP paper is the first.
    chapters: list[Chapter]
    #: Values that the templates show.
    values: Mapping[str, Any]


#: The page on the FCDP paper, and the folder of all others.
DOCUMENT, PAGES = "REPRODUCTION.md", "results/paper"


def document(claims: Claims, of: Sequence[AnyRun]) -> Document:
    """The pages of these claims and records; nothing is written."""
    values = _values(claims, of)
    chapters: list[Chapter] = values["chapters"]

    def page(template: str, **more: Any) -> str:
        context = values | more
        return pages.render(template, **context, cell=text.escaped, table=text.markdown)

    first, *others = (_once([one])[0] for one in chapters)
    both = {"chapter": first, "others": others}
    written = {DOCUMENT: page("reproduction.md.j2", base=f"{PAGES}/", **both)}
    for other in others:
        title = values["titles"][other.paper]
        more = {"base": "", "chapter": other, "title": title}
        written[f"{PAGES}/{other.paper}.md"] = page("paper.md.j2", **more)
    for name in ("claims", "hypotheses"):
        rows = [row for paper in values[name] for row in paper["rows"]]
        there = {at for row in rows for of in (row, *row["lines"]) for at in of["notes"]}
        more = {"kind": name, "groups": values[name], "there": there}
        written[f"{PAGES}/{name}.md"] = page("claims.md.j2", **more)
    written[f"{PAGES}/runs.md"] = page("runs.md.j2")
    return Document(written, chapters, values)


def _page(claims: Claims, of: Sequence[AnyRun], values: Mapping[str, Any]) -> str:
    """The self-contained HTML page, which has the figures of every run too."""
    figure, file = pages.Figures(), {run.matrix: run.file for run in of}
    first, *others = _once(values["chapters"])
    predicted = {run.matrix: run.predicted for run in of if isinstance(run, Run)}
    drawn = {
        run.matrix: [
            figure(drawing, [run.file])
            # A study has no figures of its own: its numbers are in the claims' tables.
            for drawing in (matrix.draw(compare(run.records)) if isinstance(run, Run) else ())
        ]
        for run in of
    }
    pairs = values["pairs"]
    timed = [] if pairs.empty else [*pairs["matrix"].unique()]
    beside = [there for by in (file, predicted) for name in timed if (there := by[name])]
    return pages.render(
        "reproduction.html.j2",
        **values,
        chapter=first,
        others=others,
        noted={at for one in (first, *others) for part in one.parts for at in part.notes},
        figures=drawn,
        validated=[figure(simulator.draw(pairs), beside)] if timed else [],
        figure=figure,
        files=lambda names: [file[name] for name in names if name in file],
    )


def _values(claims: Claims, of: Sequence[AnyRun]) -> dict[str, Any]:
    by_matrix = {run.matrix: run for run in of}
    where = region(claims)
    every = judge(claims, {run.matrix: run.rows for run in of}, where.ranges)
    judged = {one.claim.id: one for one in every}
    notes = _notes(every)
    verdicts = Counter(one.verdict for one in every)
    timed = [run for run in of if isinstance(run, Run)]
    ran: Counter[str] = Counter(
        r.evidence for run in timed for r in run.records if r.state != "skipped"
    )
    of_headline = [r for run in timed if run.matrix == "headline" for r in run.records]

    def shown(of: Claim) -> dict[str, Any]:
        return _shown(claims, judged[of.id], by_matrix, notes)

    ordered, pairs = simulator.orders(claims, timed), simulator.predicted(claims, timed)
    return {
        "counts": [
            {"verdict": verdict, "words": words, "count": verdicts[verdict]}
            for verdict, words in VERDICTS.items()
        ],
        **{
            kind: [
                paper.model_dump() | {"rows": rows}
                for name, paper in claims.papers.items()
                if (rows := [shown(each) for each in listed if each.paper == name])
            ]
            for kind, listed in {"claims": claims.claims, "hypotheses": claims.hypotheses}.items()
        },
        "chapters": [
            chapter(
                contents.load(claims, path),
                claims,
                of,
                judged,
                notes,
                where if path == contents.CONTENTS else None,
            )
            for path in (contents.CONTENTS, *contents.OTHERS)
        ],
        "ours": {
            one.claim.id: rounded(finding.ours, one.claim.unit)
            for one in every
            for finding in one.findings
            if finding.check.role == "result"
        },
        "unknowns": len(where.holds.unknowns),
        "drawn": len(where.points.drawn),
        "implied": sum(judged[name].verdict is None for name in where.holds.numbers),
        "cells": [(name, ran[name]) for name in text.EVIDENCE],
        "titles": {name: paper.title for name, paper in claims.papers.items()},
        "notes": notes,
        "labels": LABELS,
        "evidence": text.EVIDENCE,
        "runs": of,
        "rivals": rivals.in_words(of_headline),
        "pairs": pairs,
        "validation": simulator.agreements(pairs) if len(pairs) else [],
        "orders": simulator.choices(ordered) if ordered else [],
        "constants": simulator.constants({run.matrix: run.records for run in timed}),
        "fitted_to": ", ".join(name for names in FITTED_TO.values() for name in names),
        "framing": simulator.FRAMING,
        "fitted": simulator.FITTED,
        "caveats": {
            name: caveat
            for name, use in claims.matrices.items()
            if (caveat := use.caveat or use.noise)
        },
    }


def _once(chapters: Sequence[Chapter]) -> list[Chapter]:
    """The chapters as one page has them: each note stands in the first section that has it."""
    there, shown = set[str](), []
    for one in chapters:
        parts = []
        for part in one.parts:
            new = {at: note for at, note in part.notes.items() if at not in there}
            earlier = tuple(at for at in part.notes if at in there)
            parts.append(replace(part, notes=new, earlier=earlier))
            there |= set(new)
        shown.append(replace(one, parts=tuple(parts)))
    return shown


def _notes(judged: Sequence[Judgement]) -> dict[str, str]:
    """Each note once, however many claims have it, with an id that is a digest of its text."""
    notes = [
        note
        for one in judged
        for of in (*(finding.notes for finding in one.findings), one.notes)
        for note in of
    ]
    return {note: hashlib.sha256(note.encode()).hexdigest()[:5] for note in notes}


#: Whether a comparison counts for its claim's verdict, by its role.
_COUNTS: dict[Role, str] = {
    "result": "yes",
    "context": "no, another setting",
    "fit": "no, fitted to it",
}
#: Whether our number is as near as asked.
_NEAR = {True: "yes", False: "no", None: "undecided"}


def _shown(
    claims: Claims, of: Judgement, runs: Mapping[str, AnyRun], notes: Mapping[str, str]
) -> dict[str, Any]:
    """A claim or a hypothesis as pages show it, with a line for each of its comparisons."""
    return {
        "claim": of.claim.claim,
        "where": of.claim.where,
        "paper": labelled(of.claim),
        "verdict": of.verdict,
        "notes": [notes[note] for note in of.notes],
        "resources": of.claim.needs or "",
        "lines": [_line(claims, of.claim, finding, runs, notes) for finding in of.findings],
    }


def _line(
    claims: Claims,
    claim: Claim,
    finding: Finding,
    runs: Mapping[str, AnyRun],
    notes: Mapping[str, str],
) -> dict[str, Any]:
    matrix, run = finding.check.matrix, runs.get(finding.check.matrix)
    of_run = run.resources if run else claim.needs or claims.matrices[matrix].resources
    return {
        "ours": rounded(finding.ours, claim.unit),
        "asked": asked(finding.check, claim.unit),
        "near": "not run" if finding.ours is None else _NEAR[finding.agrees],
        "counts": _COUNTS[finding.check.role],
        "evidence": finding.evidence or text.ABSENT,
        "cells": cells(finding, claim.unit),
        "notes": [notes[note] for note in finding.notes],
        "matrix": matrix,
        "file": run.file if run else "",
        "command": claims.command(matrix),
        "resources": of_run or "",
    }

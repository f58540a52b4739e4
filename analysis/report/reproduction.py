"""REPRODUCTION.md and its page: the papers' results next to what the committed records say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from analysis import text
from analysis.claims import papers
from analysis.claims.papers import LABELS, Claims, MatrixUse
from analysis.claims.verdicts import Finding, Summary, asked, judge, quoted, rounded, summarise
from analysis.compare import orders, predictions
from analysis.compare.baseline import compare
from analysis.figures import matrix, memory
from analysis.figures import predictions as predicted
from analysis.figures.drawings import Drawing, svg
from analysis.load import runs
from analysis.load.memory import MemoryStudy
from analysis.load.runs import AnyRun, Run
from analysis.paper import contents
from analysis.paper import tables as papers_tables
from analysis.paper.chapter import Chapter, chapter
from analysis.report import pages
from analysis.report.summary import in_short
from analysis.report.tables import escaped
from simulation.emulated import FITTED_TO


@dataclass(frozen=True)
class Written:
    """Where the document and its page are."""

    document: Path
    page: Path
    #: The chapter's tables as CSV and LaTeX, and its figures.
    tables: Path
    figures: Path


def write(results: Path) -> Written:
    """Write REPRODUCTION.md beside the folder of results, and the rest into it.

    Raises ``ValueError`` for malformed claims or records, or without any.
    """
    claims, of = papers.load(), runs.load(results)
    where = Written(
        results.resolve().parent / "REPRODUCTION.md",
        results / "report.html",
        results / "paper" / "tables",
        results / "paper" / "figures",
    )
    values = _values(claims, of)
    chapters = _chapters(values)
    where.document.write_text(_markdown(values), encoding="utf-8")
    where.page.write_text(_page(claims, of, values), encoding="utf-8")
    papers_tables.write([table for one in chapters for table in one.written], where.tables)
    where.figures.mkdir(parents=True, exist_ok=True)
    for drawing in (drawing for one in chapters for drawing in one.drawn):
        (where.figures / f"{drawing.name}.svg").write_bytes(svg(drawing))
    return where


@dataclass(frozen=True)
class Document:
    """The document, which depends on the claims and the records alone."""

    markdown: str
    #: That on the FCDP paper first.
    chapters: list[Chapter]


def document(claims: Claims, of: Sequence[AnyRun]) -> Document:
    """The document of these claims and records, which is not written anywhere."""
    values = _values(claims, of)
    return Document(_markdown(values), _chapters(values))


def _chapters(values: Mapping[str, Any]) -> list[Chapter]:
    return [values["chapter"], *values["others"]]


def _markdown(values: Mapping[str, Any]) -> str:
    return pages.render(
        "reproduction.md.j2", **values, cell=escaped, table=papers_tables.as_markdown
    )


def _page(claims: Claims, of: Sequence[AnyRun], values: Mapping[str, Any]) -> str:
    """The self-contained HTML page, which has the figures of every run too."""
    # What sweeps of unknowns come to stands in the chapter.
    fit = contents.load(claims).fit
    swept = {sweep.matrix for sweep in (fit.sweeps if fit else ()) if sweep.unknowns}
    figure, file = pages.Figures(), {run.matrix: run.file for run in of}
    figures = {
        run.matrix: []
        if run.matrix in swept
        else [figure(drawn, [run.file]) for drawn in _drawn(run)]
        for run in of
    }
    pairs = _predicted(claims, of)
    timed = [] if pairs.empty else [file[name] for name in pairs["matrix"].unique()]
    predictions = [name.replace("records.jsonl", "predicted.jsonl") for name in timed]
    return pages.render(
        "reproduction.html.j2",
        **values,
        summary=in_short(of, values["chapter"]),
        figures=figures,
        validated=[figure(predicted.draw(pairs), timed + predictions)] if timed else [],
        figure=figure,
        files=lambda names: [file[name] for name in names if name in file],
        swept=sorted(swept),
    )


def _drawn(run: AnyRun) -> list[Drawing]:
    """A run's figures; none of the bound's, whose table is the claims'."""
    if isinstance(run, Run):
        return matrix.draw(compare(run.records))
    if isinstance(run, MemoryStudy) and any(record.finding for record in run.records):
        return [memory.draw(run)]
    return []


def _values(claims: Claims, of: Sequence[AnyRun]) -> dict[str, Any]:
    """What both documents show."""
    by_matrix = {run.matrix: run for run in of}
    findings = judge(claims, {run.matrix: run.rows for run in of})
    notes = _notes(claims, findings)
    first, *others = _written(claims, of, findings, notes)
    lines = [_line(claims, finding, by_matrix, notes) for finding in findings]
    summary = summarise(findings)
    verdicts = Counter(summary.values())
    evidence = {finding.evidence for finding in findings}
    timed = [run for run in of if isinstance(run, Run)]
    ordered = orders_of(claims, timed)
    return {
        "counts": [(verdict, verdicts[verdict]) for verdict in get_args(Summary)],
        "claims": len(claims.claims),
        "papers": [
            {
                **paper.model_dump(),
                "checked": [line for line in lines if line["of"] == name and line["asked"]],
                "unchecked": [line for line in lines if line["of"] == name and not line["asked"]],
            }
            for name, paper in claims.papers.items()
        ],
        "chapter": first,
        "others": others,
        "titles": {name: paper.title for name, paper in claims.papers.items()},
        "noted": {note for one in (first, *others) for note in one.noted},
        "notes": notes,
        "labels": LABELS,
        "evidence": {name: text.EVIDENCE[name] for name in text.EVIDENCE if name in evidence},
        "runs": of,
        "validation": predictions.rows(pairs) if len(pairs := _predicted(claims, of)) else [],
        "orders": orders.rows(ordered) if ordered else [],
        "wrong": orders.wrong_in_words(ordered),
        "constants": predictions.constants({run.matrix: run.records for run in timed}),
        "fitted_to": ", ".join(FITTED_TO),
        "framing": predictions.FRAMING,
        "fitted": predictions.FITTED,
        "caveats": {
            name: caveat
            for name, use in claims.matrices.items()
            if (caveat := use.caveat or use.noise)
        },
    }


def _written(
    claims: Claims, of: Sequence[AnyRun], findings: Sequence[Finding], notes: Mapping[str, int]
) -> list[Chapter]:
    """The chapters in their order; each note stands in the first that has it."""
    verdicts, noted, written = summarise(findings), set[int](), list[Chapter]()
    for path in (contents.CONTENTS, *contents.OTHERS):
        holds = contents.load(claims, path)
        written.append(chapter(holds, claims, of, findings, verdicts, notes, noted))
        noted |= written[-1].noted
    return written


def _predicted(claims: Claims, of: Sequence[AnyRun]) -> pd.DataFrame:
    """Cells that were predicted too, of matrices whose times may be read."""
    read = [
        run
        for run in of
        if isinstance(run, Run) and not claims.matrices.get(run.matrix, MatrixUse()).caveat
    ]
    pairs = [predictions.joined(run.matrix, run.records, run.predictions) for run in read]
    return pd.DataFrame([pair for found in pairs for pair in found])


def orders_of(claims: Claims, of: Sequence[Run]) -> list[orders.Order]:
    """How well each matrix is ordered, those included whose times may not be read."""
    found = (
        orders.order(
            run.matrix,
            run.records,
            run.predictions,
            readable=not claims.matrices.get(run.matrix, MatrixUse()).caveat,
        )
        for run in of
    )
    return [each for each in found if each is not None]


def _notes(claims: Claims, findings: Sequence[Finding]) -> dict[str, int]:
    """Each reason once, however many claims it is given for, with its number."""
    reasons = (
        reason
        for finding in findings
        for reason in finding.reasons
        if reason != claims.papers[finding.claim.paper].untested
    )
    return {reason: at for at, reason in enumerate(dict.fromkeys(reasons), start=1)}


def _line(
    claims: Claims, finding: Finding, of: Mapping[str, AnyRun], notes: Mapping[str, int]
) -> dict[str, Any]:
    """A finding's figures as text."""
    claim, check = finding.claim, finding.check
    line = {
        "id": claim.id,
        "of": claim.paper,
        "claim": claim.claim,
        "where": claim.where,
        "label": claim.label,
        "paper": quoted(claim.number, claim.unit),
        "ours": rounded(finding.ours, claim.unit),
        "asked": "",
        "evidence": finding.evidence or text.ABSENT,
        "verdict": finding.verdict,
        "cells": finding.cells,
        "notes": [notes[reason] for reason in finding.reasons if reason in notes],
        "command": "",
        "resources": claim.needs or "",
    }
    if check is not None:
        use, run = claims.matrices[check.matrix], of.get(check.matrix)
        line["asked"] = asked(check, claim.unit)
        line["command"] = use.command or f"python -m experiments run {check.matrix}"
        line["resources"] = run.resources if run else claim.needs or use.resources or ""
    return line

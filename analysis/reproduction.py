"""REPRODUCTION.md and its page: each claim of the papers next to what the committed records say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from analysis import figures, pages, provenance, text
from analysis.claims import LABELS, Claims, matrix_files
from analysis.claims import load as load_claims
from analysis.comparison import compare
from analysis.frame import frame, latest
from analysis.tables import escaped
from analysis.verdicts import Finding, Summary, asked, judge, quoted, rounded, summarise
from experiments.records import Record, read


@dataclass(frozen=True)
class Run:
    """The committed records of one matrix, one a cell."""

    matrix: str
    records: list[Record]

    @cached_property
    def table(self) -> pd.DataFrame:
        return frame(self.records)

    @property
    def resources(self) -> str:
        """What the run took: cells, time, processors."""
        ran = [record for record in self.records if record.state != "skipped"]
        minutes = sum(record.seconds for record in ran) / 60
        cores = sorted({record.hardware["cores"] for record in ran if "cores" in record.hardware})
        parts = [f"{len(ran)} cells", f"{text.number(minutes, 2)} min"]
        return ", ".join(parts + [f"{count} cores" for count in cores])


@dataclass(frozen=True)
class Written:
    """Where the document and its page are."""

    document: Path
    page: Path


def runs(results: Path) -> list[Run]:
    """The committed runs of this repository's matrices, by name.

    Raises ``ValueError`` if there are none or one holds a malformed record.
    """
    files = ((name, results / name / "records.jsonl") for name in matrix_files())
    found = [Run(name, latest(read(file))) for name, file in files if file.exists()]
    if not found:
        raise ValueError(f"{results}: no records of any matrix; there are {matrix_files()}")
    return found


def write(results: Path) -> Written:
    """Write REPRODUCTION.md beside the folder of results, and the page into it."""
    of = runs(results)
    claims = load_claims()
    where = Written(results.resolve().parent / "REPRODUCTION.md", results / "report.html")
    where.document.write_text(markdown(claims, of), encoding="utf-8")
    where.page.write_text(page(claims, of), encoding="utf-8")
    return where


def markdown(claims: Claims, of: Sequence[Run]) -> str:
    """The document; it depends on the claims and the records alone."""
    return pages.render("reproduction.md.j2", **_values(claims, of), cell=escaped)


def page(claims: Claims, of: Sequence[Run]) -> str:
    """The self-contained HTML page, which has the figures of every run too."""
    drawn = []
    for run in of:
        pictures = [pages.figure(drawing) for drawing in figures.draw(compare(run.table))]
        drawn.append({"matrix": run.matrix, "figures": pictures, **_origin(run.table)})
    return pages.render("reproduction.html.j2", **_values(claims, of), runs=drawn)


def _origin(table: pd.DataFrame) -> dict[str, Any]:
    """Where a run's records come from."""
    return {
        "summary": provenance.provenance(table),
        "commits": provenance.commits(table),
        "versions": provenance.distinct(table, "versions"),
        "hardware": provenance.distinct(table, "hardware"),
    }


def _values(claims: Claims, of: Sequence[Run]) -> dict[str, Any]:
    """What both documents show."""
    findings = judge(claims, {run.matrix: run.records for run in of})
    rows = [_row(claims, finding, {run.matrix: run for run in of}) for finding in findings]
    verdicts = Counter(summarise(findings).values())
    shown = {name for row in rows if (name := row["evidence"]) != text.ABSENT}
    return {
        "counts": [(verdict, verdicts[verdict]) for verdict in _SUMMARIES],
        "claims": len(claims.claims),
        "papers": [
            {
                "title": paper.title,
                "arxiv": paper.arxiv,
                "untested": paper.untested,
                "checked": [row for row in rows if row["paper_id"] == name and row["checked"]],
                "unchecked": [
                    row for row in rows if row["paper_id"] == name and not row["checked"]
                ],
            }
            for name, paper in claims.papers.items()
        ],
        "failed": _failed(rows),
        "labels": LABELS,
        "evidence": {name: text.EVIDENCE[name] for name in text.EVIDENCE if name in shown},
        "matrices": [_origin_row(run) for run in of],
    }


_SUMMARIES: tuple[Summary, ...] = get_args(Summary)


def _row(claims: Claims, finding: Finding, of: Mapping[str, Run]) -> dict[str, Any]:
    """A finding's figures as text."""
    claim, check = finding.claim, finding.check
    row = {
        "id": claim.id,
        "paper_id": claim.paper,
        "claim": claim.claim,
        "where": claim.where,
        "label": claim.label,
        "paper": quoted(claim.number, claim.unit),
        "ours": rounded(finding.ours, claim.unit),
        "evidence": finding.evidence or text.ABSENT,
        "verdict": finding.verdict,
        "cells": finding.cells,
        "reason": finding.reason,
        "checked": check is not None,
        "asked": "" if check is None else asked(check, claim.unit),
        "command": "",
        "resources": claim.needs or "",
    }
    if check is not None:
        use, run = claims.matrices[check.matrix], of.get(check.matrix)
        row["command"] = use.command or f"python -m experiments run {check.matrix}"
        row["resources"] = run.resources if run else claim.needs or use.resources or ""
    return row


def _failed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What did not reproduce, a claim and reason once however many matrices say so."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["verdict"] == "not reproduced":
            item = found.setdefault((row["id"], row["reason"]), {**row, "ours": []})
            ours = {"value": row["ours"], "evidence": row["evidence"], "command": row["command"]}
            item["ours"].append(ours)
    return list(found.values())


def _origin_row(run: Run) -> dict[str, str]:
    """A run's line in the table of runs."""
    return {
        "matrix": run.matrix,
        "resources": run.resources,
        "summary": provenance.provenance(run.table),
    }

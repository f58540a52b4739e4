"""One self-contained HTML file, and beside it the figures, the table and the data it is made of."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import strategies, text
from analysis.compare.baseline import compare, headlines, seeds_in_words
from analysis.figures import drawings
from analysis.figures.matrix import draw
from analysis.load import provenance
from analysis.load.table import latest, write_parquet
from analysis.report import pages, tables
from experiments.records.record import Record
from simulation.quantities import format_link

#: Columns that say what trained a cell.
_ENGINE = ["strategy", "engine", "engine_version", "policy"]


@dataclass(frozen=True)
class Written:
    report: Path
    table: Path
    data: Path
    #: Each as PNG and as SVG.
    figures: list[tuple[Path, Path]]


def write(found: Mapping[Path, Sequence[Record]], directory: Path, baseline: str) -> Written:
    """Compare, draw and write everything to ``directory``; records come by file."""
    directory.mkdir(parents=True, exist_ok=True)
    records = [record for of in found.values() for record in of]
    kept = latest(records)
    compared = compare(kept, baseline)
    drawn = draw(compared)
    written = Written(
        report=directory / "report.html",
        table=directory / "comparison.md",
        data=directory / "cells.parquet",
        figures=[drawings.save(drawing, directory) for drawing in drawn],
    )
    write_parquet(compared, written.data)
    written.table.write_text(markdown(compared), encoding="utf-8")
    files = {Path(os.path.relpath(file, directory)): of for file, of in found.items()}
    page = render(compared, drawn, files, replaced=len(records) - len(kept))
    written.report.write_text(page, encoding="utf-8")
    return written


def markdown(compared: pd.DataFrame) -> str:
    """The comparison table with its notes, ready for a README."""
    every, seeds = tables.presentable(compared), seeds_in_words(compared)
    table, by_seed = (text.markdown(each, tables.WORDS) for each in (every, seeds))
    notes = "\n".join(f"- {note}" for note in tables.notes(compared))
    over = "" if seeds.empty else f"\n{tables.OVER_SEEDS}:\n\n{by_seed}\n"
    return f"{table}\n\n{notes}\n{over}"


def render(
    compared: pd.DataFrame,
    drawn: Sequence[drawings.Drawing],
    files: Mapping[Path, Sequence[Record]],
    replaced: int = 0,
) -> str:
    """The report's HTML; ``files`` are relative to it."""
    figure = pages.Figures()
    return pages.render(
        "report.html.j2",
        matrices=sorted(compared["matrix"].unique()),
        summary=provenance.provenance(compared),
        headlines=headlines(compared),
        tunings=text.TUNINGS,
        figures=[figure(drawing, _records(drawing, files)) for drawing in drawn],
        sections=_sections(compared),
        words=tables.WORDS,
        notes=tables.notes(compared),
        failures=compared[~compared["state"].isin(["ok", "skipped"])],
        skipped=list(compared.loc[compared["state"] == "skipped", "cell"]),
        evidence=[(name, text.EVIDENCE[name]) for name in sorted(compared["evidence"].unique())],
        commits=provenance.commits(compared),
        versions=provenance.distinct(compared, "versions"),
        hardware=provenance.distinct(compared, "hardware"),
        networks=_networks(compared),
        engines=compared.loc[compared["engine"].notna(), _ENGINE].drop_duplicates().fillna(""),
        emulated=(compared["evidence"] == "emulated").any(),
        above_closed_form=_above_closed_form(compared),
        absent=text.ABSENT,
        replaced=replaced,
    )


def _records(drawing: drawings.Drawing, files: Mapping[Path, Sequence[Record]]) -> list[str]:
    return [
        file.as_posix()
        for file, records in files.items()
        if any(record.cell.matrix == drawing.matrix for record in records)
    ]


def _sections(compared: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The table cut by model and tuning, under titles that a section does not repeat."""
    shown = tables.presentable(compared)
    titles = [name for name in ("Matrix", "Model", "Tuning", "Accumulation") if name in shown]
    sections = []
    for keys, rows in shown.groupby(titles, sort=False):
        words = [text.TUNINGS.get(str(key), str(key)) for key in keys]
        if "Accumulation" in titles:
            words[-1] = f"accumulation {words[-1]}"
        sections.append((" · ".join(words), rows.drop(columns=titles)))
    seeds = seeds_in_words(compared)
    return sections if seeds.empty else [*sections, (tables.OVER_SEEDS, seeds)]


def _networks(compared: pd.DataFrame) -> list[tuple[str, dict[str, str]]]:
    """Settings of the shaper, for each link."""
    found = []
    keys = compared["inter_bandwidth_bits_per_s"].map(format_link)
    for link, cells in compared.groupby(keys, sort=False):
        found += [(str(link), setting) for setting in provenance.distinct(cells, "network")]
    return found


def _above_closed_form(compared: pd.DataFrame) -> list[tuple[str, str]]:
    """For each strategy, what it sent over the least that its schedule must send."""
    finished = compared[compared["bytes_of_closed_form"].notna()]
    return [
        (
            strategies.label(name),
            text.one_or_range(
                finished.loc[finished["strategy"] == name, "bytes_of_closed_form"], "ratio"
            ),
        )
        for name in strategies.ordered(finished["strategy"])
    ]

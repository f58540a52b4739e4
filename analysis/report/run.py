"""A run's report: its table of strings with units, figures, data, and one self-contained page."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from analysis import strategies, text
from analysis.compare.baseline import (
    OPTIONAL,
    SETTINGS,
    SPEED,
    compare,
    filled,
    headlines,
    seeds_in_words,
    varying,
)
from analysis.figures import drawings
from analysis.figures.matrix import draw
from analysis.load import provenance
from analysis.load.table import latest, write_parquet
from analysis.report import pages
from experiments.records.comparison import FEWEST
from experiments.records.record import METRICS, Record
from simulation.quantities import format_link

#: Columns of words; all others hold numbers and are set flush right.
WORDS = {"Model", "Tuning", "Link", "Strategy", "Evidence", "State"}
WORDS |= {item.setting.label for item in OPTIONAL.values()}

#: Title of the table of seeds.
OVER_SEEDS = "Over seeds: mean ± standard deviation; differences seed by seed from the baseline"
#: Columns that say what trained a cell.
_ENGINE = ["strategy", "engine", "engine_version", "policy"]


@dataclass(frozen=True)
class Written:
    report: Path
    table: Path
    data: Path
    #: Each figure as PNG and as SVG.
    figures: list[tuple[Path, Path]]


def write(files: Mapping[Path, Sequence[Record]], directory: Path, baseline: str) -> Written:
    """Compare, draw and write all to ``directory``; ``files`` has the records of each file."""
    directory.mkdir(parents=True, exist_ok=True)
    records = [record for group in files.values() for record in group]
    newest = latest(records)
    compared = compare(newest, baseline)
    drawn = draw(compared)
    written = Written(
        report=directory / "report.html",
        table=directory / "comparison.md",
        data=directory / "cells.parquet",
        figures=[drawings.save(drawing, directory) for drawing in drawn],
    )
    write_parquet(compared, written.data)
    written.table.write_text(markdown(compared), encoding="utf-8")
    relative = {Path(os.path.relpath(file, directory)): group for file, group in files.items()}
    page = render(compared, drawn, relative, replaced=len(records) - len(newest))
    written.report.write_text(page, encoding="utf-8")
    return written


def markdown(compared: pd.DataFrame) -> str:
    """The comparison table with its notes, ready for a README."""
    cells, seeds = presentable(compared), seeds_in_words(compared)
    table, by_seed = (text.markdown(frame, WORDS) for frame in (cells, seeds))
    below = "\n".join(f"- {note}" for note in notes(compared))
    over = "" if seeds.empty else f"\n{OVER_SEEDS}:\n\n{by_seed}\n"
    return f"{table}\n\n{below}\n{over}"


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
        words=WORDS,
        notes=notes(compared),
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
    shown = presentable(compared)
    titles = [name for name in ("Matrix", "Model", "Tuning", "Accumulation") if name in shown]
    sections = []
    for keys, rows in shown.groupby(titles, sort=False):
        words = [text.TUNINGS.get(str(key), str(key)) for key in keys]
        if "Accumulation" in titles:
            words[-1] = f"accumulation {words[-1]}"
        sections.append((" · ".join(words), rows.drop(columns=titles)))
    seeds = seeds_in_words(compared)
    return sections if seeds.empty else [*sections, (OVER_SEEDS, seeds)]


def _networks(compared: pd.DataFrame) -> list[tuple[str, dict[str, str]]]:
    """The traffic shaper's settings for each link."""
    networks = []
    keys = compared["inter_bandwidth_bits_per_s"].map(format_link)
    for link, cells in compared.groupby(keys, sort=False):
        networks += [(str(link), setting) for setting in provenance.distinct(cells, "network")]
    return networks


def _above_closed_form(compared: pd.DataFrame) -> list[tuple[str, str]]:
    """For each strategy, the bytes that it sent over the least that its schedule must send."""
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


def presentable(compared: pd.DataFrame) -> pd.DataFrame:
    """One row of strings per cell; a cell without a result keeps its row and says its state.

    Cells that the matrix leaves out have no row: there may be more of them than of all others.
    ``notes`` counts them and gives the reasons.
    """
    compared = compared[compared["state"] != "skipped"]
    finished = compared["state"] == "ok"

    def shown(column: str, form: Callable[[float], str]) -> pd.Series:
        values: pd.Series = compared[column].where(finished).map(form)
        return values

    columns = {
        "Model": compared["model"],
        "Tuning": compared["tuning"],
        **{
            OPTIONAL[name].setting.label: compared[name].map(OPTIONAL[name].written)
            for name in varying(compared)
        },
        "Link": compared["inter_bandwidth_bits_per_s"].map(format_link),
        "Strategy": compared["strategy"].map(strategies.label),
        "s/step": shown("step_seconds_median", text.number),
        "tokens/s": shown("tokens_per_s", text.number),
        "speed-up": pd.Series(
            map(text.speed_up, *(compared[name] for name in SPEED)), finished.index
        ),
        "MB sent/step": shown("inter_node_bytes_per_step", text.megabytes),
        "of baseline": shown("bytes_of_baseline", text.percent),
        "closed form MB": shown("inter_node_bytes_closed_form", text.megabytes),
        "sent / closed form": shown("bytes_of_closed_form", text.number),
        "ledger off by": shown("ledger_disagreement_percent", text.signed_percent),
        "host MB": shown("peak_host_bytes", text.megabytes),
        "device MB": shown("peak_device_bytes", text.megabytes),
        "final loss": shown("loss_final", text.loss),
        "loss difference": shown("loss_difference", text.signed_loss),
        **{m.title: shown(name, partial(text.metric, m)) for name, m in METRICS.items()},
        "Evidence": compared["evidence"],
        "State": compared["state"],
    }
    return filled(pd.DataFrame(columns))


def notes(compared: pd.DataFrame) -> list[str]:
    """Notes below the table: what it compares with, and how it was obtained."""
    lines = [
        "speed-up and “of baseline” compare with the cell of the same settings that ran "
        + "; ".join(_baselines(compared))
        + ". In brackets, where clocks were read, the speed-up's interval by rounds; "
        "not significant: 1 is in it.",
        "MB sent/step: 10⁶ bytes that leave the busiest node; closed form: the least that the "
        "strategy's schedule must send.",
    ]
    if few := int(compared["decides"].eq(0).sum()):
        lines.append(
            f"{few} of the speed-ups are of fewer than {FEWEST} rounds: the interval is all that "
            "these span, and decides no claim."
        )
    if compared["ledger_disagreement_percent"].notna().any():
        lines.append(
            "ledger off by: the payload that the strategy counted itself against the kernel's "
            "counters, which include the transport's framing and control messages."
        )
    if compared["loss_difference"].notna().any() and compared["steps"].nunique() > 1:
        lines.append(
            "final loss: after each cell's own last step; loss difference: after the last step "
            "that both cells trained."
        )
    lines += [f"{name}: {text.EVIDENCE[name]}." for name in sorted(compared["evidence"].unique())]
    states = compared["state"].value_counts()
    lacking = [f"{count} {state}" for state, count in states.items() if state != "ok"]
    if lacking:
        lines.append(f"Of {len(compared)} cells, {', '.join(lacking)}.")
    # The number of cells that each rule of the matrix leaves out.
    reasons = compared.loc[compared["state"] == "skipped", "error"].fillna("no reason given")
    lines += [f"{count} skipped: {reason}." for reason, count in reasons.value_counts().items()]
    return lines


def _baselines(compared: pd.DataFrame) -> list[str]:
    """Each baseline that was used and, where there are several, for how many settings."""
    chosen = compared.drop_duplicates(SETTINGS)["baseline"].dropna()
    counts = {strategies.label(str(k)): count for k, count in chosen.value_counts().items()}
    if len(counts) < 2:
        return [*counts] or ["no baseline, as no cell finished"]
    return [f"{name} ({count} of {len(chosen)} settings)" for name, count in counts.items()]

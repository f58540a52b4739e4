"""What to print under a figure: how to read it, and how its numbers were obtained."""

from __future__ import annotations

import math

import pandas as pd

from analysis import strategies, text
from analysis.compare.baseline import PANEL, annotated
from analysis.figures import axes
from analysis.load.provenance import provenance
from simulation.quantities import format_link


def both(cells: pd.DataFrame) -> str:
    """How to read the figure of throughput and bytes, and how its numbers were obtained."""
    return _joined(
        f"Top: {_throughput(cells)}", f"Bottom: {_bytes(cells)}", _missing(cells), provenance(cells)
    )


def throughput(cells: pd.DataFrame) -> str:
    """The same of throughput alone."""
    how = _throughput(cells)
    return _joined(how[0].upper() + how[1:], _missing(cells), provenance(cells))


def traffic(cells: pd.DataFrame) -> str:
    """The same of bytes alone."""
    return _joined(_bytes(cells), _missing(cells), provenance(cells))


def slots(cells: pd.DataFrame) -> str:
    """How to read the figure of slots, and how its numbers were obtained."""
    return _joined(
        "A slot is a stage's forward or backward of one micro-batch. MB: 10⁶ bytes, parameters "
        "and gradients that a rank sends in the slot, and what autograd keeps at most in it.",
        "All at once: what DDP sends in its one exchange, by its node's counter; what a step's "
        "micro-batches side by side would keep.",
        provenance(cells),
    )


def intervals(cells: pd.DataFrame) -> str:
    """How to read held-out losses over the interval."""
    seeds = cells["seed"].nunique()
    points = f"A point per seed, of {seeds}; lines" if seeds > 1 else "Lines"
    level = (cells["steps_per_round"] == 1).any()
    return _joined(
        "Loss of data that none trained on, after as many steps and the same batches.",
        f"{points} join medians.",
        "Level: exchanged in each step." if level else "",
        provenance(cells),
    )


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _bytes(cells: pd.DataFrame) -> str:
    return (
        f"10⁶ bytes that leave the busiest node in a step{_over_links(cells)}; the tick "
        "marks, where it is known, the least that the strategy's schedule must send."
    )


def _throughput(cells: pd.DataFrame) -> str:
    """How to read axes of throughput, which are bars where there is but one link."""
    steps = text.one_or_range(_timed_steps(cells), "whole")
    links = cells["inter_bandwidth_bits_per_s"]
    gains = bool(annotated(cells)["speed_up"].notna().any())
    over = (
        f"{strategies.label(strategies.SUBJECT)}'s speed-up over "
        f"{strategies.label(strategies.BASELINE)}."
    )
    references = cells.loc[cells["baseline"].map(strategies.is_ablation), "baseline"].unique()
    if len(references):
        gains = True
        over = (
            f"the speed-up over {strategies.styles(cells['strategy'])[references[0]].label}; "
            "no difference: its interval has 1 in it."
        )
    if links.nunique(dropna=False) == 1:
        return _joined(
            "tokens a second of the whole cluster, each node's egress limit being "
            f"{format_link(links.iloc[0])} (medians of {steps} steps; lines: the middle half of "
            "the rounds).",
            f"Beside the bar: {over}" if gains else "",
        )
    return _joined(
        "tokens a second of the whole cluster against each node's egress limit (medians of "
        f"{steps} steps; whiskers, where they outgrow the marker: the middle half of the rounds; "
        "both axes logarithmic).",
        "Hollow markers: the link was not shaped." if links.isna().any() else "",
        f"Above the points: {over}" if gains else "",
    )


def _timed_steps(cells: pd.DataFrame) -> list[int]:
    """How many steps each finished cell timed."""
    return [len(seconds) for seconds in cells.loc[cells["state"] == "ok", "step_seconds"]]


def _over_links(cells: pd.DataFrame) -> str:
    """What a bar stands for where there are several links."""
    if cells["inter_bandwidth_bits_per_s"].nunique(dropna=False) == 1:
        return ""
    return f", median over the links (which differ by up to {text.percent(_spread(cells))})"


def _spread(cells: pd.DataFrame) -> float:
    """The most by which the bytes of one bar differ between its links, over the least of them."""
    finished = cells[cells["state"] == "ok"]
    sent = finished.groupby([*PANEL, "strategy"], dropna=False)["inter_node_bytes_per_step"]
    return float((sent.max() / sent.min() - 1).max())


def losses(cells: pd.DataFrame) -> str:
    """What the loss figure shows, and how far the strategies are apart."""
    apart = float(cells["loss_difference_max"].max())
    longest = max(map(len, cells.loc[cells["state"] == "ok", "losses"]), default=0)
    step = "each optimizer step"
    if longest > axes.MOST_STEPS:
        step = f"{axes.MOST_STEPS} optimizer steps of each line, or all if fewer, and the last"
    return _joined(
        f"Mean loss over ranks and micro-batches at {step}, warm-up included; one line "
        "a cell, drawn thinner from strategy to strategy so that lines that coincide stay visible.",
        f"Largest difference to the baseline at any step of any cell: {apart:.2g}."
        if not math.isnan(apart)
        else "",
        provenance(cells),
    )


def _missing(cells: pd.DataFrame) -> str:
    """Which cells the figure lacks."""
    lacking = cells[cells["state"] != "ok"]
    if lacking.empty:
        return ""
    named = "; ".join(f"{cell['cell']} ({cell['state']})" for _, cell in lacking.iterrows())
    return f"Without a result (crosses): {named}."

"""The comparison as a reader sees it: strings with units, for Markdown and for the report."""

from collections.abc import Callable
from functools import partial

import pandas as pd

from analysis import strategies, text
from analysis.compare.baseline import OPTIONAL, SETTINGS, SPEED, filled, varying
from experiments.records.comparison import FEWEST
from experiments.records.record import METRICS
from simulation.quantities import format_link

#: Columns of words; all others hold numbers and are set flush right.
WORDS = {"Model", "Tuning", "Link", "Strategy", "Evidence", "State"}
WORDS |= {item.setting.label for item in OPTIONAL.values()}

#: Title of the table of seeds.
OVER_SEEDS = "Over seeds: mean ± standard deviation; differences seed by seed from the baseline"


def presentable(compared: pd.DataFrame) -> pd.DataFrame:
    """One row of strings a cell; a cell without a result keeps its row and says its state.

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
        **{one.title: shown(name, partial(text.metric, one)) for name, one in METRICS.items()},
        "Evidence": compared["evidence"],
        "State": compared["state"],
    }
    return filled(pd.DataFrame(columns))


def notes(compared: pd.DataFrame) -> list[str]:
    """Notes below the table: what it compares with, and how it was obtained."""
    found = [
        "speed-up and “of baseline” compare with the cell of the same settings that ran "
        + "; ".join(_baselines(compared))
        + ". In brackets, where clocks were read, the speed-up's interval by rounds; "
        "not significant: 1 is in it.",
        "MB sent/step: 10⁶ bytes that leave the busiest node; closed form: the least that the "
        "strategy's schedule must send.",
    ]
    if few := int(compared["decides"].eq(0).sum()):
        found.append(
            f"{few} of the speed-ups are of fewer than {FEWEST} rounds: the interval is all that "
            "these span, and decides no claim."
        )
    if compared["ledger_disagreement_percent"].notna().any():
        found.append(
            "ledger off by: the payload that the strategy counted itself against the kernel's "
            "counters, which include the transport's framing and control messages."
        )
    if compared["loss_difference"].notna().any() and compared["steps"].nunique() > 1:
        found.append(
            "final loss: after each cell's own last step; loss difference: after the last step "
            "that both cells trained."
        )
    found += [f"{name}: {text.EVIDENCE[name]}." for name in sorted(compared["evidence"].unique())]
    states = compared["state"].value_counts()
    lacking = [f"{count} {state}" for state, count in states.items() if state != "ok"]
    if lacking:
        found.append(f"Of {len(compared)} cells, {', '.join(lacking)}.")
    # How many cells each rule of the matrix leaves out.
    reasons = compared.loc[compared["state"] == "skipped", "error"].fillna("no reason given")
    found += [f"{count} skipped: {reason}." for reason, count in reasons.value_counts().items()]
    return found


def _baselines(compared: pd.DataFrame) -> list[str]:
    """Each baseline that was used and, where there are several, for how many settings."""
    chosen = compared.drop_duplicates(SETTINGS)["baseline"].dropna()
    counts = {strategies.label(str(k)): count for k, count in chosen.value_counts().items()}
    if len(counts) < 2:
        return [*counts] or ["no baseline, as no cell finished"]
    return [f"{name} ({count} of {len(chosen)} settings)" for name, count in counts.items()]

"""The table of docs/planning.md on published pipelines."""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from analysis import text
from simulation import published
from simulation.published import Predicted

_KINDS: Sequence[tuple[str, Callable[[Predicted], bool]]] = (
    ("350M, nodes of RTX cards, 0.9 to 23 Gbit/s", lambda of: of.step.mixed_gbit_s is not None),
    (
        "350M, nodes of four GH200, 740 Gbit/s",
        lambda of: of.step.mixed_gbit_s is None and of.step.model == "opt-350m",
    ),
    ("2.7B, nodes of four GH200, 740 Gbit/s", lambda of: of.step.model == "gpt-neo-2.7b"),
    ("all", lambda of: True),
)


def of_pipelines() -> str:
    """How well the steps of published pipelines are predicted, as Markdown."""
    rows = []
    for title, is_one in _KINDS:
        steps = [*filter(is_one, published.predicted())]
        errors = [abs(of.error) for of in steps]
        apart, right = published.orders(steps)
        share, most = (f"{100 * of:.1f} %" for of in (median(errors), np.quantile(errors, 0.9)))
        rows.append((title, f"{len(steps)}", share, most, f"{right} of {apart}"))
    columns = ("Published steps", "Count", "Median error", "Nine of ten within", "Pairs in order")
    return text.table(columns, rows, columns[:1])

"""Where drawings of these pages go: docs/figures, or the folder that a command is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parent / "figures"


def write(figures: Mapping[str, Figure], arguments: Sequence[str]) -> None:
    """Write each figure as SVG by its name, into the first of ``arguments`` if there is one.

    Text stays text, and the same drawing gives the same file.
    """
    folder = Path(arguments[0]) if arguments else FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fcdp"}):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})

"""Where drawings of these pages go: docs/figures, or the folder that a command is given.

Tests draw into a folder of their own, and compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parent / "figures"


def folder(arguments: Sequence[str]) -> Path:
    """The folder that a command's arguments name, made if need be; without one, docs/figures."""
    named = Path(arguments[0]) if arguments else FIGURES
    named.mkdir(parents=True, exist_ok=True)
    return named


def write(figures: Mapping[str, Figure], arguments: Sequence[str]) -> None:
    """Write each figure as SVG by its name, into the folder that the command was given.

    Text stays text, and the same drawing gives the same file.
    """
    into = folder(arguments)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fcdp"}):
        for name, figure in figures.items():
            figure.savefig(into / f"{name}.svg", metadata={"Date": None, "Creator": None})

"""Draws the figures of these pages, into docs/figures or another folder.

python -m docs.draw                     all of them
python -m docs.draw map schedule        these
python -m docs.draw map --anew          with docs/figures/map.json computed again, in ten minutes
python -m docs.draw bound --into FOLDER

Tests draw into a folder of their own, and compare.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from docs import (
    draw_ablation,
    draw_bound,
    draw_compute,
    draw_differences,
    draw_fuyou,
    draw_map,
    draw_overview,
    draw_schedule,
)

FOLDER = Path(__file__).resolve().parent / "figures"
#: Figures of each module by the names of their files.
FIGURES: dict[str, Callable[[], Mapping[str, Figure]]] = {
    "ablation": lambda: {"ablation": draw_ablation.draw()},
    "bound": lambda: {"bound": draw_bound.draw()},
    "compute": lambda: {"compute": draw_compute.draw()},
    "differences": lambda: {"differences": draw_differences.draw()},
    "fuyou": draw_fuyou.figures,
    "map": draw_map.figures,
    "overview": draw_overview.figures,
    "schedule": draw_schedule.figures,
}


def write(name: str, folder: Path) -> None:
    """Write each figure as SVG: text stays text, and the same drawing gives the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fcdp"}):
        for stem, figure in FIGURES[name]().items():
            figure.savefig(folder / f"{stem}.svg", metadata={"Date": None, "Creator": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the figures of these pages.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--anew", action="store_true", help="compute map.json again")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in FIGURES]:
        parser.error(f"{unknown[0]!r} is no figure; allowed: {', '.join(FIGURES)}")
    if options.anew:
        draw_map.compute()
    for name in options.names or FIGURES:
        write(name, options.into)


if __name__ == "__main__":
    main()

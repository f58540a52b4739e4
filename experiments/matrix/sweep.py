"""One cell of a matrix, as a W&B sweep's agent asks for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baselines import registry
from experiments.matrix.matrix import Matrix, MatrixCell
from experiments.records.cell import Cell

#: Fields of cells, and settings of their strategies.
_NAMES = (*(name for name in Cell.model_fields if name != "settings"), *registry.setting_names())


def pick(matrix: Matrix, arguments: Sequence[str]) -> MatrixCell:
    """The one cell of the matrix with the settings of ``--name=value`` arguments.

    Raises ``ValueError`` for a setting that there is not, a value that no cell has, and settings
    that leave more than one cell.
    """
    chosen = list(matrix.cells)
    for argument in arguments:
        name, separator, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not separator or name not in _NAMES:
            allowed = ", ".join(f"--{field}=" for field in _NAMES)
            raise ValueError(f"{argument!r} is not a setting and its value; allowed: {allowed}")
        there = list(dict.fromkeys(_text(entry, name) for entry in chosen))
        chosen = [entry for entry in chosen if _text(entry, name) == value]
        if not chosen:
            raise ValueError(f"{name} = {value!r}: cells of {matrix.name} have {', '.join(there)}")
    if len(chosen) > 1:
        raise ValueError(
            f"{len(chosen)} cells of {matrix.name} are left, such as {chosen[0].cell.id} and "
            f"{chosen[1].cell.id}; give more settings"
        )
    return chosen[0]


def _text(entry: MatrixCell, name: str) -> str:
    cell = entry.cell
    value = getattr(cell, name) if name in Cell.model_fields else getattr(cell.settings, name, None)
    return str(getattr(value, "name", value))


def run_id() -> str | None:
    """The run that W&B's agent has made for this cell; ``None`` outside a sweep."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None

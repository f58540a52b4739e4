"""The settings in which the cells of a table, a figure or a panel differ, in words."""

from __future__ import annotations

import pandas as pd

from experiments.records import settings
from experiments.records.cell import Cell

#: Settings that a table names only where they differ between its cells.
OPTIONAL = {
    name: item
    for name in settings.names(Cell, "condition")
    if not (item := settings.described(Cell)[name]).setting.always
}
#: A panel of a figure shows cells that agree in the first of these, over all strategies and all
#: values of the second.
PANEL = settings.names(Cell, "condition", place="model")
AXES = settings.names(Cell, "condition", place="axis")


def varying(table: pd.DataFrame) -> list[str]:
    """The optional settings that differ between the cells of this table that ran."""
    ran = table[table["state"] != "skipped"]
    return [name for name in OPTIONAL if ran[name].nunique(dropna=False) > 1]


def in_words(name: str, value: object) -> str:
    """An optional setting and its value, such as ``accumulation 4``."""
    return f"{OPTIONAL[name].setting.label.lower()} {OPTIONAL[name].written(value)}"

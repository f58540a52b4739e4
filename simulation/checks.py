"""Checks of numbers that users give; each error names the field, the value and what is allowed."""

from __future__ import annotations

import math


def positive(**fields: float) -> None:
    """Raise ``ValueError`` for a field that is not above zero; infinity is allowed."""
    for name, value in fields.items():
        if math.isnan(value) or value <= 0:
            raise ValueError(f"{name} = {value!r}: must be above 0")


def not_negative(**fields: float) -> None:
    """Raise ``ValueError`` for a field that is not a finite number, 0 or more."""
    for name, value in fields.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} = {value!r}: must be a finite number, 0 or more")


def counts(**fields: int) -> None:
    """Raise ``ValueError`` for a field that is not a whole number, 1 or more."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, 1 or more")


def share(**fields: float) -> None:
    """Raise ``ValueError`` for a field outside 0 to 1."""
    for name, value in fields.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} = {value!r}: must be between 0 and 1")

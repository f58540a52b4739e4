"""Checks of what users give; each error names the field, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_Check = Callable[[str, Any], None]


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


#: Types of fields that a ``Checked`` dataclass checks.
Positive = Annotated[float, lambda name, value: positive(**{name: value})]
NotNegative = Annotated[float, lambda name, value: not_negative(**{name: value})]
Count = Annotated[int, lambda name, value: counts(**{name: value})]
Share = Annotated[float, lambda name, value: share(**{name: value})]


class Checked:
    """Base of dataclasses that raise ``ValueError`` for what a field's type does not allow.

    Besides the types above these are literals, and either of them or ``None``.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check in _checks(kind):
            check(name, getattr(self, name))


@cache
def _checks(kind: Any) -> tuple[tuple[str, _Check], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple((name, check) for name, hint in hints.items() for check in _of(hint))


def _of(hint: Any) -> Iterator[_Check]:
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    elif get_origin(hint) is Literal:
        yield _one_of(get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for check in (check for part in get_args(hint) for check in _of(part)):
            yield _unless_none(check)


def _one_of(allowed: tuple[Any, ...]) -> _Check:
    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise ValueError(f"{name} = {value!r}: allowed are {', '.join(map(str, allowed))}")

    return check


def _unless_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)

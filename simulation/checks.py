"""Checks of what users give; each error names the field, the value and what is allowed."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_Check = Callable[[str, Any], None]


@dataclass(frozen=True)
class _Condition:
    """A condition on fields. Raises ``ValueError`` for one that does not meet it."""

    allowed: str
    holds: Callable[[Any], bool]

    def __call__(self, **fields: Any) -> None:
        for name, value in fields.items():
            self.check(name, value)

    def check(self, name: str, value: Any) -> None:
        if not self.holds(value):
            raise ValueError(f"{name} = {value!r}: must be {self.allowed}")


#: Infinity is above zero, too.
positive = _Condition("above 0", lambda value: value > 0)
not_negative = _Condition(
    "a finite number, 0 or more", lambda value: math.isfinite(value) and value >= 0
)
counts = _Condition("a whole number, 1 or more", lambda value: type(value) is int and value >= 1)
share = _Condition("between 0 and 1", lambda value: 0 <= value <= 1)


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ``ValueError`` for a field with another value than these."""
    if value not in allowed:
        raise ValueError(f"{name} = {value!r}: allowed are {', '.join(map(str, allowed))}")


#: Types of fields that a ``Checked`` dataclass checks.
Positive = Annotated[float, positive.check]
NotNegative = Annotated[float, not_negative.check]
Count = Annotated[int, counts.check]
Share = Annotated[float, share.check]


class Checked:
    """Base of dataclasses that raise ``ValueError`` for what a field's type does not allow.

    Checked are the types above, literals, and unions of either with ``None``.
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
        yield partial(one_of, allowed=get_args(hint))
    elif get_origin(hint) in (Union, UnionType):
        for check in (check for part in get_args(hint) for check in _of(part)):
            yield _unless_none(check)


def _unless_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)

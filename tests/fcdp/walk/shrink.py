"""The shortest walk that fails still."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import count
from pathlib import Path

from tests.fcdp.walk.options import Options
from tests.fcdp.walk.seeds import Case, run
from tests.ranks import Pools


def shrunk(ranks: Pools, case: Case, scratch: Path) -> Case:
    """Leave out events, then set options to their defaults, for as long as the walk fails."""
    runs = count()
    smaller = True
    while smaller:
        smaller = False
        for candidate in (*_with_fewer_events(case), *_with_plainer_options(case)):
            if run(ranks, candidate, scratch / f"shrink-{next(runs)}") is not None:
                case, smaller = candidate, True
                break
    return case


def _with_fewer_events(case: Case) -> Iterator[Case]:
    """Without runs of events, long ones first; later ones first, as most come after the failure."""
    length = len(case.events) // 2
    while length:
        for end in range(len(case.events), length - 1, -length):
            yield replace(case, events=case.events[: end - length] + case.events[end:])
        length //= 2


def _with_plainer_options(case: Case) -> Iterator[Case]:
    plain = Options()
    for field in fields(Options):
        value = getattr(plain, field.name)
        if field.name == "adapter_rank" and case.options.replicated:
            continue
        if getattr(case.options, field.name) != value:
            yield replace(case, options=replace(case.options, **{field.name: value}))

"""The shortest walk that fails still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count
from pathlib import Path

from tests.fcdp.walk.options import Options
from tests.fcdp.walk.seeds import Case, run
from tests.ranks import Pools


def shrunk(ranks: Pools, case: Case, scratch: Path) -> Case:
    """Leave out events and set options to their defaults for as long as the walk fails."""
    numbers = count()

    def fails(candidate: Case) -> bool:
        return run(ranks, candidate, scratch / f"shrink-{next(numbers)}") is not None

    before = None
    while case != before:
        before = case
        case = _with_plainer_options(_with_fewer_events(case, fails), fails)
    return case


def _with_fewer_events(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Without runs of events, long ones first; from the end, as most come after the failure."""
    length = (len(case.events) + 1) // 2
    while length:
        end = len(case.events)
        while end > 0:
            start = max(0, end - length)
            candidate = replace(case, events=case.events[:start] + case.events[end:])
            if fails(candidate):
                case = candidate
            end = start
        length //= 2
    return case


def _with_plainer_options(case: Case, fails: Callable[[Case], bool]) -> Case:
    plain = Options()
    for field in fields(Options):
        default = getattr(plain, field.name)
        if getattr(case.options, field.name) == default:
            continue
        if field.name == "adapter_rank" and case.options.replicated:
            continue  # there is nothing else to replicate
        candidate = replace(case, options=replace(case.options, **{field.name: default}))
        if fails(candidate):
            case = candidate
    return case

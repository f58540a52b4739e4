"""The grid search: the largest batch that fits, and the fastest option of each strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import isqrt

from simulation import prediction
from simulation.hardware import Hardware
from simulation.memory import Shortfall
from simulation.planner.option import (
    Option,
    most_computed_per_s,
    most_tokens_per_s,
    simulated,
)
from simulation.planner.request import Request
from simulation.prediction import Built, build, largest_micro_batch, needed
from simulation.workload import Workload

#: Options of one strategy this close are the same; the simplest, which comes first, is taken.
SAME = 0.01


@dataclass(frozen=True)
class Verdict:
    """What the search has found for one strategy."""

    strategy: str
    #: What was simulated; none: the strategy does not fit.
    options: tuple[Option, ...]
    #: Sequences per rank and micro-batch, at any point of the grid; 0 if it does not fit.
    largest_micro_batch: int
    #: Memory that the point of the grid lacks which lacks least.
    shortfall: Shortfall

    @property
    def best(self) -> Option | None:
        """The fastest option, or a simpler one as fast; ``None`` if the strategy does not fit."""
        if not self.options:
            return None
        fastest = max(option.tokens_per_s for option in self.options)
        return next(
            option for option in self.options if option.tokens_per_s >= (1 - SAME) * fastest
        )


def search(request: Request) -> tuple[Verdict, ...]:
    """One verdict per strategy, in the order of the request."""
    grouped = groupby(request.workloads(), key=lambda workload: workload.strategy)
    return tuple(_verdict(strategy, list(points), request) for strategy, points in grouped)


def shortfalls(request: Request) -> list[tuple[str, Shortfall]]:
    """What each point of the grid lacks, by strategy; nothing is simulated."""
    return [
        (point.strategy, needed(tried, request.hardware).lacks(request.hardware))
        for point in request.workloads()
        for tried in _tried(point, request)
    ]


def fits(request: Request) -> bool:
    """Whether any point of the grid does; nothing is simulated."""
    return any(
        prediction.fits(tried, request.hardware)
        for point in request.workloads()
        for tried in _tried(point, request)
    )


def _verdict(strategy: str, points: list[Workload], request: Request) -> Verdict:
    hardware = request.hardware
    lacking: list[Shortfall] = []
    fitting: list[Workload] = []
    for point in points:
        fitting += _fitting(point, request)
        lacking += [needed(tried, hardware).lacks(hardware) for tried in _tried(point, request)]
    largest = max((workload.micro_batch for workload in fitting), default=0)
    if request.micro_batches:  # all that is named is shown
        options = tuple(simulated(workload, hardware) for workload in fitting)
    else:
        options = _options(fitting, hardware)
    least = min(lacking, key=lambda lack: lack.of_node(hardware.ranks_per_node))
    return Verdict(strategy, options, largest, least)


def _options(fitting: list[Workload], hardware: Hardware) -> tuple[Option, ...]:
    """Simulate, the most promising first, until no other can be faster; in the order given.

    A bound by computation alone is cheap; one by all resources is found of those alone that come
    next by the cheap one.
    """
    found: dict[int, Option] = {}
    built: dict[int, Built] = {}
    waiting = [(-most_computed_per_s(one, hardware), at) for at, one in enumerate(fitting)]
    heapify(waiting)
    while waiting:
        bound, at = heappop(waiting)
        # A simpler one, which comes earlier, is taken even if it is a little slower.
        beaten = (
            option.tokens_per_s * (1 - SAME) >= -bound
            if at < other
            else option.tokens_per_s >= (1 - SAME) * -bound
            for other, option in found.items()
        )
        if any(beaten):
            continue
        if at in built:
            found[at] = simulated(fitting[at], hardware, built.pop(at))
        elif fitting[at].accumulation > 1:  # of which computation alone is counted
            found[at] = simulated(fitting[at], hardware)
        else:
            step = built[at] = build(fitting[at], hardware)
            heappush(waiting, (-most_tokens_per_s(step), at))
    return tuple(found[at] for at in sorted(found))


def _fitting(point: Workload, request: Request) -> list[Workload]:
    """The point with the micro-batches that fit, largest first.

    Unless the request names them this is one: a larger micro-batch spreads what a step costs
    anyway over more tokens, so that none is faster than the largest.
    """
    hardware = request.hardware
    if not request.micro_batches and request.sequences_per_rank is None:
        most = largest_micro_batch(point, hardware)
        return [replace(point, micro_batch=most)] if most else []
    fitting = [tried for tried in _tried(point, request) if prediction.fits(tried, hardware)]
    return fitting if request.micro_batches else fitting[:1]


def _tried(point: Workload, request: Request) -> list[Workload]:
    """The point with each micro-batch that the request allows, largest first; else with 1."""
    whole = request.sequences_per_rank
    if whole is None:
        sizes = request.micro_batches or (1,)
        return [replace(point, micro_batch=size) for size in sorted(sizes, reverse=True)]
    sizes = request.micro_batches or _divisors(whole)
    return [
        replace(point, micro_batch=size, accumulation=whole // size)
        for size in sorted(sizes, reverse=True)
    ]


@cache
def _divisors(whole: int) -> tuple[int, ...]:
    small = [n for n in range(1, isqrt(whole) + 1) if whole % n == 0]
    return (*small, *(whole // n for n in small if n * n != whole))

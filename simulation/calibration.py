"""Constants of emulated hosts and of GPUs by least squares, each with its interval.

A step's time is linear in the constants. Those of a host whose cores all ranks share (seconds per
operation, message and byte) are fitted to records without a limit on their links; those of GPUs
(inverse shares of their data sheets, and costs of launches, exchanged bytes and scale) to published
runs, see ``simulation.compute``. Relative errors are minimised. Large ones of published runs weigh
less: some runs are slower than their neighbours by a quarter, for no reason that the tables give. A
constant on which few rows depend stays close to its usual value.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from simulation import compute
from simulation.compute import Check, Constant, Fitted, Row, Run
from simulation.emulated import Constants, MeasuredStep, emulated
from simulation.files import now
from simulation.hardware import scale
from simulation.planner.search import simulated
from simulation.prediction import build, predict
from simulation.step.schedule import added_bytes
from simulation.workload import block_kernels, token_work, unpacked_bytes

#: Constants that all engines have in common. Times of operations are fitted, not rates.
_SHARED = ("message_seconds", "byte_seconds", "gathered_byte_seconds", "activation_byte_seconds")
#: Draws of the bootstrap. Its units err alike: a model's steps under one strategy, a GPU's rows of
#: one size.
_DRAWS, _SEED = 200, 7
_INTERVAL = (0.05, 0.95)
_NOTHING = Constants(flops=math.inf)
#: Rounds of a fit to limited links, and the size of a change of calls' and messages' seconds.
_LINEAR_ROUNDS, _USUAL_SECONDS = 3, 1e-2
#: Rounds of reweighting, and the error below which all rows weigh the same.
_ROUNDS, _SMALL = 20, 0.02
#: Exchanges of all parameters per micro-batch: gathers of forward and backward, one reduction.
_EXCHANGES = 3
#: Micro-batches of a step that are simulated; those of a row's step are alike.
_SIMULATED = 3
#: Quantiles of the known sources' errors between which nine of ten rows of a further source lie: a
#: test leaves each source out in turn.
_ENDS = (0.025, 0.975)

_T = TypeVar("_T")


def calibrate(steps: Sequence[MeasuredStep], limited: Sequence[MeasuredStep] = ()) -> Constants:
    """Fit a host's constants: least squares of the relative errors of times, none below zero.

    A step without a limit on its links takes what the host's cores take, which is linear in the
    constants. Those of ``limited`` links, if any are fitted to, are linear in small changes: the
    fit starts from the other steps and is made anew a few times. Raises ``ValueError`` if there are
    fewer steps without a limit than constants.
    """
    free, names, solve = _least_squares(steps)
    found = _constants_of(dict(zip(names, solve(range(len(free))), strict=True)))
    for _ in range(_LINEAR_ROUNDS if limited else 0):
        found = _constants_of(_once_more([*free, *limited], names, found))
    return found


def _constants_of(by_name: Mapping[str, float]) -> Constants:
    """Constants by the names of a fit, in which ``flops`` are the seconds of one."""
    parts = {
        part: {name.split()[0]: value for name, value in by_name.items() if name.endswith(part)}
        for part in (" block", " step")
    }
    return Constants(
        flops=1 / by_name["flops"] if by_name["flops"] else math.inf,
        block_seconds=parts[" block"],
        step_seconds=parts[" step"],
        **{name: by_name[name] for name in _SHARED},
    )


def _once_more(
    steps: Sequence[MeasuredStep], names: Sequence[str], around: Constants
) -> dict[str, float]:
    """The fit where seconds change by small changes as they do around these constants."""
    usual = dict.fromkeys(names, _USUAL_SECONDS) | {"flops": 1e-11}
    usual |= {name: 1e-9 for name in _SHARED if name != "message_seconds"}
    at = {name: getattr(around, name, 0.0) for name in _SHARED} | {"flops": 1 / around.flops}
    for part in ("block", "step"):
        own = getattr(around, f"{part}_seconds").items()
        at |= {f"{engine} {part}": value for engine, value in own}
    measured = np.array([step.seconds for step in steps])
    here = np.array([_seconds(step, around) for step in steps])
    columns = []
    for name in names:
        more = _constants_of(at | {name: at[name] + _SMALL * usual[name]})
        there = np.array([_seconds(step, more) for step in steps])
        columns.append((there - here) / (_SMALL * usual[name]))
    features = np.array(columns).T / measured[:, None]
    target = 1 - here / measured + features @ np.array([at[name] for name in names])
    return dict(zip(names, not_negative(features, target), strict=True))


def intervals(steps: Sequence[MeasuredStep]) -> list[Constant]:
    """The constants of ``calibrate`` with intervals by a bootstrap: in seconds, ``flops`` a rate.

    A draw that lacks an engine is left out.
    """
    free, names, solve = _least_squares(steps)

    def group(row: int) -> tuple[str, str]:
        workload = free[row].workload
        return workload.model.name, workload.strategy

    def solve_complete(rows: list[int]) -> list[float] | None:
        complete = _engines([free[at] for at in rows]) == _engines(free)
        return solve(rows) if complete else None

    ends = bootstrap(range(len(free)), group, solve_complete)
    constants = []
    for name, value, least, most in zip(names, solve(range(len(free))), *ends, strict=True):
        if name == "flops":
            value, least, most = (1 / end if end else math.inf for end in (value, most, least))
        constants.append(Constant(name=name, value=value, low=float(least), high=float(most)))
    return constants


def bootstrap(
    rows: Iterable[_T],
    group: Callable[[_T], object],
    solve: Callable[[list[_T]], Sequence[float] | None],
) -> NDArray[np.float64]:
    """Both ends of each number's interval in nine of ten draws, whose units are whole groups.

    A draw for which ``solve`` returns ``None`` is left out.
    """
    groups: dict[object, list[_T]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    units, draw = list(groups.values()), np.random.default_rng(_SEED)
    drawn = []
    for _ in range(_DRAWS):
        chosen = draw.integers(len(units), size=len(units))
        if (solution := solve([row for index in chosen for row in units[index]])) is not None:
            drawn.append(solution)
    ends: NDArray[np.float64] = np.quantile(np.array(drawn), _INTERVAL, axis=0)
    return ends


def _engines(steps: Sequence[MeasuredStep]) -> list[str]:
    return sorted({step.workload.engine for step in steps})


def _least_squares(
    steps: Sequence[MeasuredStep],
) -> tuple[list[MeasuredStep], list[str], Callable[[Sequence[int]], list[float]]]:
    """Steps that only cores limit, the constants' names, and a solver by some of these steps."""
    unlimited = (step for step in steps if math.isinf(step.hardware.inter_bytes_per_s))
    free = [step for step in unlimited if not step.workload.served]
    # Hosts on each of which only one thing takes time, by the name of the constant.
    alone: dict[str, dict[str, Any]] = {name: {name: 1.0} for name in ("flops", *_SHARED)}
    for part in ("block", "step"):
        alone |= {f"{name} {part}": {f"{part}_seconds": {name: 1.0}} for name in _engines(free)}
    units = {name: Constants(**{"flops": math.inf, **cost}) for name, cost in alone.items()}
    if len(free) < len(units):
        raise ValueError(
            f"records: hold {len(free)} cells without a limit that ran, "
            f"{len(units)} constants need as many at least"
        )
    measured = np.array([step.seconds for step in free])
    rest = np.array([_busy(step, _NOTHING) for step in free])
    columns = [[_busy(step, constants) for step in free] for constants in units.values()]
    features = (np.array(columns).T - rest[:, None]) / measured[:, None]
    target = 1 - rest / measured
    return free, [*units], lambda rows: not_negative(features[rows], target[rows])


def _busy(step: MeasuredStep, constants: Constants) -> float:
    """Seconds per step that the host's cores are in full use, or all that a pipeline takes."""
    if step.workload.schedule.cut:
        return _seconds(step, constants)
    hardware = emulated(*step.hardware.shape, None, constants)
    tasks = build(step.workload, hardware).tasks.tasks
    return sum(task.demands.get("compute", 0.0) for task in tasks)


def _seconds(step: MeasuredStep, constants: Constants) -> float:
    """Seconds of a step on its cluster with these constants."""
    hardware = step.hardware
    with_these = emulated(*hardware.shape, None, constants)
    fields = ("device", "rates", "overheads")
    changed = {name: getattr(with_these, name) for name in fields}
    return predict(step.workload, replace(hardware, **changed)).step_seconds


def not_negative(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Fit least squares without negative coefficients: those become 0, the rest is refitted."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1
    active = np.arange(features.shape[1])
    while True:
        solution, *_ = np.linalg.lstsq(features[:, active] / scale[active], target, rcond=None)
        if (solution >= 0).all():
            break
        active = active[solution >= 0]
    coefficients = np.zeros(features.shape[1])
    coefficients[active] = solution / scale[active]
    return [float(value) for value in coefficients]


@dataclass(frozen=True)
class _Usual:
    """A constant before any row is seen, and its limit: our estimates, but for attention's."""

    value: float
    #: Its weight, in rows of the fit.
    rows: float
    #: The largest possible value, and whether the constant is a share.
    most: float
    share: bool = True


#: Shares that FlashAttention-2 reaches, forward and backward: the papers on it and on the third.
_ATTENTION: Mapping[str, float] = {"a100": 0.6, "h100": 0.37}
_COMMON: Mapping[str, _Usual] = {
    compute.LAUNCH: _Usual(4.0, 0.02, most=12.0, share=False),
    # Written and read by the exchange, copied into and out of its buffers.
    compute.PASSES: _Usual(4.0, 0.0025, most=8.0, share=False),
    compute.LOST: _Usual(0.15, 0.01, most=0.5, share=False),
}
_SHARES = {"products": _Usual(0.75, 0.25, most=0.95), "bytes": _Usual(0.7, 0.04, most=0.92)}


def _usual(name: str) -> _Usual:
    of, _, part = name.partition(" ")
    if part == "attention":
        return _Usual(_ATTENTION.get(of, 0.5), 4.0, most=0.8)
    return _COMMON.get(name) or _SHARES[part]


def fit(runs: Sequence[Run]) -> Fitted:
    """Fit the constants, with the usual value of each as further rows.

    Raises ``ValueError`` where there are fewer runs than constants.
    """
    named = dict.fromkeys(name for run in runs for name in compute.shares(run.row.gpu))
    names = [*sorted(named, key=lambda name: (name.split()[1], name)), *_COMMON]
    if len(runs) < len(names):
        raise ValueError(
            f"rows: {len(runs)} were given, {len(names)} constants need as many at least"
        )
    features = np.array([[_features(run).get(name, 0.0) for name in names] for run in runs])
    target = np.array([1 - _optimizer_share(run) for run in runs])
    usual = [_usual(name) for name in names]
    inverse = np.array([1 / one.value if one.share else one.value for one in usual])
    least = np.array([1 / one.most if one.share else 0.0 for one in usual])
    rows = np.array([one.rows for one in usual]) ** 0.5
    # The fit is of the excess of each over its least possible value, which is not negative.
    target = np.concatenate([target - features @ least, rows * (1 - least / inverse)])
    features = np.concatenate([features, np.diag(rows / inverse)])
    solution = least + np.array(_robust(features, target, len(runs)))
    for at, one in enumerate(usual):
        if not one.share and solution[at] > one.most:  # is clamped, and the rest refitted
            rest = np.delete(np.arange(len(names)), at)
            fixed = target - features[:, at] * one.most
            solution[rest] = least[rest] + _robust(features[:, rest], fixed, len(runs))
            solution[at] = one.most
    values = [1 / value if one.share else value for one, value in zip(usual, solution, strict=True)]
    return dict(zip(names, map(float, values), strict=True))


def _features(run: Run) -> dict[str, float]:
    """Each constant's coefficient in the time of a token, over the measured time."""
    device, workload, row = run.hardware.device, run.workload, run.row
    work, tokens, layers = token_work(workload), workload.tokens, workload.model.layers
    measured = 1 / row.tokens_per_s_per_gpu
    products, attention, nbytes = compute.shares(row.gpu)
    passes = layers * (2 + workload.recomputed)
    alone = run.hardware.world_size == 1 or workload.schedule.shards == "rank"
    exchanged = 0 if alone else _EXCHANGES * workload.element_bytes * workload.parameters
    added = added_bytes(workload, run.hardware) * (1 - 1 / workload.accumulation)
    moved = work.nbytes + (passes * unpacked_bytes(workload) + added) / tokens
    factors = {
        products: work.products / device.peak_flops,
        attention: work.attention / device.peak_flops,
        nbytes: moved / device.memory_bytes_per_s,
        compute.LAUNCH: 2e-6 * layers * block_kernels(workload) / tokens,
        compute.PASSES: exchanged / tokens / device.memory_bytes_per_s,
    }
    return {name: value / measured for name, value in factors.items()} | {
        compute.LOST: scale(run.hardware.nodes)
    }


def _optimizer_share(run: Run) -> float:
    """Share of the measured time that the optimizer's step takes by the data sheet."""
    workload, world = run.workload, run.hardware.world_size
    seconds = (
        workload.adam_bytes * workload.trained / world / run.hardware.device.memory_bytes_per_s
    )
    tokens = workload.tokens * workload.accumulation
    return seconds / tokens * run.row.tokens_per_s_per_gpu


def _robust(features: NDArray[np.float64], target: NDArray[np.float64], rows: int) -> list[float]:
    """Fit with weights that fall with the error of the first ``rows``, the measured ones."""
    weights = np.ones(len(target))
    for _ in range(_ROUNDS):
        solution = not_negative(features * weights[:, None], target * weights)
        errors = np.abs(features @ np.array(solution) - target)[:rows]
        weights[:rows] = 1 / np.sqrt(np.maximum(errors, _SMALL))
    return solution


def settle(rows: Iterable[Row], commit: str | None) -> compute.ComputeRecord:
    """Fit the bf16 rows, and check the fit; ``commit`` is the one that the record names."""
    runs = [compute.run_of(row) for row in rows if row.bf16]
    whole = fit(runs)
    held_out = _left_out(runs, lambda run: run.row.source)
    kinds = _left_out(runs, lambda run: compute.architecture(run.row.gpu))
    by_all = {id(run): tokens_per_gpu_s(run, whole) for run in runs}
    checks = [
        _check("all rows, fitted", runs, by_all),
        _check(compute.SOURCES, runs, held_out),
        _check(compute.ARCHITECTURES, runs, kinds),
    ]
    for source in dict.fromkeys(run.row.source for run in runs):
        checks.append(_check(source, [r for r in runs if r.row.source == source], held_out))
    return compute.ComputeRecord(
        constants=_constants(runs, whole),
        checks=checks,
        predictions=[
            compute.Predicted(row=run.row, fitted=by_all[id(run)], held_out=held_out[id(run)])
            for run in runs
        ],
        commit=commit,
        started_at=now(),
    )


def errors(rows: Iterable[Row], fitted: Fitted) -> Check:
    """How well the constants predict the rows in bf16. Raises ``ValueError`` if there are none.

    All micro-batches of a row's step are counted: of many the last one alone may cross nodes.
    """
    runs = [compute.run_of(row) for row in rows if row.bf16]
    if not runs:
        raise ValueError("rows: hold none in bf16")
    predicted = {}
    for run in runs:
        hardware = replace(run.hardware, rates=compute.rates_by(fitted, run.hardware.device))
        option = simulated(run.workload, hardware)
        predicted[id(run)] = option.tokens_per_s / hardware.world_size
    return _check("given rows", runs, predicted)


def tokens_per_gpu_s(run: Run, fitted: Fitted) -> float:
    """Tokens per second and GPU as the simulator predicts them."""
    hardware = replace(run.hardware, rates=compute.rates_by(fitted, run.hardware.device))
    some = replace(run.workload, accumulation=min(_SIMULATED, run.workload.accumulation))
    return predict(some, hardware).tokens_per_s / hardware.world_size


def _left_out(runs: Sequence[Run], group: Callable[[Run], str]) -> dict[int, float]:
    """Each run's prediction by the fit to the runs of all other groups."""
    predictions = {}
    for name in dict.fromkeys(group(run) for run in runs):
        others = fit([run for run in runs if group(run) != name])
        for run in runs:
            if group(run) == name:
                predictions[id(run)] = tokens_per_gpu_s(run, others)
    return predictions


def _check(what: str, runs: Sequence[Run], predicted: Mapping[int, float]) -> Check:
    ratios = [(r.row.source, r.row.tokens_per_s_per_gpu / predicted[id(r)]) for r in runs]
    absolute = [abs(1 / ratio - 1) for _, ratio in ratios]
    lowest, highest = spread(ratios)
    return Check(
        what=what,
        rows=len(runs),
        median=round(median(absolute), 4),
        nine_of_ten=round(float(np.quantile(absolute, 0.9)), 4),
        worst=round(max(absolute), 4),
        lowest=round(float(lowest), 4),
        highest=round(float(highest), 4),
    )


def spread(ratios: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """The range of nine of ten ratios of a further source, where known sources weigh the same."""
    count = Counter(source for source, _ in ratios)
    ordered = sorted((ratio, 1 / count[source]) for source, ratio in ratios)
    reached = np.cumsum([weight for _, weight in ordered]) / len(count)
    low, high = (ordered[int(np.searchsorted(reached, end - 1e-9))][0] for end in _ENDS)
    return low, high


def _constants(runs: Sequence[Run], whole: Fitted) -> list[Constant]:
    """The constants with intervals; a draw that lacks a GPU, or cannot be fitted, is left out."""
    names = list(whole)

    def solve(drawn: list[Run]) -> list[float] | None:
        try:
            numbers = fit(drawn)
        except ValueError:
            return None
        return [numbers[name] for name in names] if {*numbers} == {*names} else None

    ends = bootstrap(runs, lambda run: (run.row.gpu, run.row.model), solve)
    constants = []
    for name, *numbers in zip(names, whole.values(), *ends, strict=True):
        value, low, high = (float(f"{number:.4g}") for number in numbers)
        constants.append(Constant(name=name, value=value, low=low, high=high))
    return constants

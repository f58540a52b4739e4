"""The grid search: each point's speed and how sure that is, and the fastest of each strategy."""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from math import isqrt

from simulation import compute, prediction
from simulation.hardware import Hardware
from simulation.memory import ONE_TIER, Footprint, Shortfall
from simulation.pipeline import Pipeline
from simulation.planner.request import Request
from simulation.prediction import (
    Built,
    Prediction,
    build,
    largest_micro_batch,
    needed,
    simulate_built,
    utilisations,
)
from simulation.step.pipeline import least_seconds, work_of
from simulation.step.schedule import adam_seconds, adding_seconds, overhead_seconds
from simulation.step.tasks import busy_seconds, chain_seconds
from simulation.workload import Attention, Kernels, Workload, token_work, unpacked_bytes

#: Micro-batches of a step that are simulated; mostly each further one is like the last of them.
_SIMULATED = 3
#: Micro-batches of all groups of a pipeline that are simulated in any case.
_FEW = 1024
#: Factors of the rates of links, where data sheets alone are known and where they were measured:
#: ours.
_NOMINAL_LINKS, _MEASURED_LINKS = (0.75, 1.2), (0.95, 1.05)
#: FCDP alone, and over offloaded shards.
FORMS = ("fcdp", "fcdp-offload")
#: Options of one strategy this close are the same; the simplest, which comes first, is taken.
SAME = 0.01


@dataclass(frozen=True)
class Option:
    """A workload that fits, with what it takes; the speed of its step, and what that waits for."""

    workload: Workload
    footprint: Footprint
    step_seconds: float
    #: Tokens per second of the whole cluster.
    tokens_per_s: float
    mfu: float
    hfu: float
    #: Seconds of the critical path by the resource that its tasks wait for; their sum is the step.
    waits_seconds: Mapping[str, float]
    #: Seconds of full use of each resource.
    busy_seconds: Mapping[str, float]
    #: Bytes per step that one node sends to others.
    inter_node_bytes: float

    @property
    def bottleneck(self) -> str:
        """The resource that the step waits for longest."""
        return max(self.waits_seconds, key=lambda name: self.waits_seconds[name])

    def as_fast(self, tokens_per_s: float) -> bool:
        """Whether this option counts as no slower than so many tokens per second."""
        return self.tokens_per_s >= (1 - SAME) * tokens_per_s

    @property
    def sent_bytes_per_token(self) -> float:
        """Bytes that one node sends to others per token of the whole cluster."""
        return self.inter_node_bytes / (self.tokens_per_s * self.step_seconds)


def most_tokens_per_s(built: Built) -> float:
    """Tokens per second that its busiest resource and its longest chain of tasks allow."""
    tasks = built.tasks.tasks[built.begin :]
    seconds = max(busy_seconds(tasks).values())
    if not built.begin:
        seconds = max(seconds, chain_seconds(tasks))
    return built.hardware.world_size * built.workload.tokens * built.workload.accumulation / seconds


def most_per_s(workload: Workload, hardware: Hardware) -> float:
    """Tokens per second that no schedule exceeds, by computation alone or a pipeline's closed form.

    Neither simulates, nor lists a step's tasks.
    """
    if workload.schedule.cut:
        step = least_seconds(work_of(Pipeline.of(workload, hardware)))
        return hardware.world_size * workload.tokens * workload.accumulation / step
    return hardware.world_size / _token_seconds(workload, hardware)


def _token_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds in which a rank computes a token."""
    passes = workload.model.layers * (2 + workload.recomputed)
    one_pass = unpacked_bytes(workload) / hardware.rates.copied_bytes_per_s
    return hardware.seconds(token_work(workload)) + passes * one_pass / workload.tokens


def simulated(
    workload: Workload, hardware: Hardware, built: Callable[[Workload], Built] | None = None
) -> Option:
    """The option of a workload that fits, simulated; ``built`` knows steps that were built before.

    From the third micro-batch on each is like the one before: a step of many takes as long as one
    of three, plus the difference between three and two for each further one.
    """
    count, counted = workload.accumulation, _counted(workload, hardware)

    def of_micro_batches(count: int) -> Prediction:
        some = workload.changed(accumulation=count)
        return simulate_built(build(some, hardware) if built is None else built(some))

    last = of_micro_batches(counted)
    more = count - counted
    fewer = of_micro_batches(counted - 1) if more else last

    def whole(measure: Callable[[Prediction], Mapping[str, float]]) -> dict[str, float]:
        before = measure(fewer)
        return {key: v + more * (v - before.get(key, 0.0)) for key, v in measure(last).items()}

    step = whole(lambda of: {"seconds": of.step_seconds, "sent": of.inter_node_bytes})
    seconds = step["seconds"]
    per_gpu = workload.tokens * count / seconds
    mfu, hfu = utilisations(workload, hardware.device, per_gpu)
    return Option(
        workload,
        last.footprint,
        step_seconds=seconds,
        tokens_per_s=per_gpu * hardware.world_size,
        mfu=mfu,
        hfu=hfu,
        waits_seconds=whole(_waits),
        busy_seconds=whole(lambda of: {k: used * of.step_seconds for k, used in of.busy.items()}),
        inter_node_bytes=step["sent"],
    )


def _counted(workload: Workload, hardware: Hardware) -> int:
    """Micro-batches of the longest step that tells how long one of all of them takes.

    They are three; or two where no cache and no sum tells the first and the last from the others.
    Where a workers' mean arrives meanwhile they are all, as the step waits for it until they take
    longer; and those of a pipeline that has few actions, as it comes to be steady late.
    """
    count, schedule = workload.accumulation, workload.schedule
    late = schedule.averages in ("late", "streamed")
    cached = schedule.cache is not None and schedule.cached_for != "micro-batch"
    differ = schedule.accumulates_without_sync or cached
    least = _SIMULATED if differ else _SIMULATED - 1
    if schedule.cut:
        groups = hardware.nodes // workload.nodes_per_stage
        least = max(least, _FEW // groups**2)  # each has all ranks' micro-batches, of each group
    # Two steps of so many micro-batches have no fewer than one of this many.
    return count if late or count < 2 * least else least


def _waits(prediction: Prediction) -> dict[str, float]:
    """Seconds of the critical path, by the resource that each task on it needs longest."""
    timeline = prediction.timeline
    waits: dict[str, float] = {}
    for index in timeline.critical_path:
        task, span = timeline.tasks[index], timeline.spans[index]
        waits[task.slowest] = waits.get(task.slowest, 0.0) + span.end - span.start
    return waits


def tokens_range(option: Option, request: Request) -> tuple[float, float]:
    """Tokens per second between which nine of ten such steps are expected.

    Each resource that the step waits for becomes slower or faster by its own range. That is the
    most: the step may come to wait for another one. Kernels that nobody named are a further source
    of error, independent of the others.
    """
    hardware, rates = request.hardware, request.hardware.rates
    measured = rates.basis.startswith("preflight")
    links = _MEASURED_LINKS if measured else _NOMINAL_LINKS
    computed = computed_range(option.workload, hardware, request.kernels, request.attention)
    low, high = (
        sum(
            seconds / (computed[end] if name == "compute" else links[end])
            for name, seconds in option.waits_seconds.items()
        )
        for end in (0, 1)
    )
    tokens = option.tokens_per_s * option.step_seconds
    return tokens / low, tokens / high


def computed_range(
    workload: Workload, hardware: Hardware, kernels: Kernels | None, attention: Attention | None
) -> tuple[float, float]:
    """Factors of computation's speed; kernels that nobody named may be the slowest or fastest."""
    rates = hardware.rates
    slow = replace(workload, attention=attention or "flash-1")
    fast = replace(workload, kernels=kernels or "fused")
    seconds, longest, shortest = (rates.seconds(token_work(one)) for one in (workload, slow, fast))
    return (
        math.exp(-math.hypot(math.log(rates.lowest), math.log(seconds / longest))),
        math.exp(math.hypot(math.log(rates.highest), math.log(seconds / shortest))),
    )


def tie() -> float:
    """Relative difference of two predictions below which the simulator cannot order them.

    Two that err independently by the median error of sources left out differ by √2 times that.
    Whichever source is left out, the same strategies are tied or ahead (a test has examples).
    Rounded down to whole percents, as sentences have it.
    """
    return math.floor(100 * math.sqrt(2) * compute.read().check(compute.SOURCES).median) / 100


def rests_on(hardware: Hardware) -> str:
    """The basis of the seconds of computation, in words, with their range."""
    rates = hardware.rates
    if rates.basis == "share of the peak":
        return f"data sheet, of which {hardware.matmul_efficiency:.0%} are taken to be reached"
    span = f"{rates.lowest - 1:+.0%} to {rates.highest - 1:+.0%}"
    texts = {
        "fitted": f"fitted to runs on {rates.measured_on}; sources left out erred by",
        "nearest architecture": f"no run on {hardware.device.name} is known: data sheet, by the "
        f"shares that {rates.measured_on} reached;",
        "preflight": "matrix products measured by preflight, the rest by the shares that "
        f"{rates.measured_on} reached;",
        "preflight's block": "a transformer block measured by preflight, its parts by the shares "
        f"that {rates.measured_on} reached;",
    }
    return f"{texts[rates.basis]} {span}"


@dataclass(frozen=True, eq=False)
class Verdict:
    """Verdict of the search on one strategy; of pipelines, by what shards their stages."""

    strategy: str
    #: Options that were simulated; none: the strategy does not fit.
    options: tuple[Option, ...]
    #: Sequences per rank and micro-batch, at any point of the grid; 0 if it does not fit.
    largest_micro_batch: int
    #: Memory that the point of the grid lacks which lacks least; none where one fits.
    shortfall: Shortfall
    #: Whether FCDP shards the stages of a pipeline.
    fcdp_inside: bool = False

    @property
    def name(self) -> str:
        """The strategy, and what is inside of it."""
        return f"{self.strategy} of fcdp" if self.fcdp_inside else self.strategy

    @property
    def uses_fcdp(self) -> bool:
        """Whether it is a form of FCDP: alone, over offloaded shards, or inside of stages."""
        return self.fcdp_inside or self.strategy in FORMS

    @cached_property
    def best(self) -> Option | None:
        """The fastest option, or a simpler one as fast; ``None`` if the strategy does not fit."""
        if not self.options:
            return None
        fastest = max(option.tokens_per_s for option in self.options)
        return next(option for option in self.options if option.as_fast(fastest))


def search(request: Request, *, least: float = 0.0) -> tuple[Verdict, ...]:
    """One verdict per strategy, two of pipelines, in the order of the request.

    What cannot reach the ``least`` tokens per second is not simulated, and is no option.
    """
    grouped: dict[tuple[str, bool], list[Workload]] = {}
    for point in request.workloads():
        grouped.setdefault((point.strategy, point.within_stage == "fcdp"), []).append(point)
    return tuple(_verdict(key, points, request, least) for key, points in grouped.items())


def shortfalls(request: Request) -> Iterator[tuple[str, Shortfall]]:
    """List what each point of the grid lacks, by strategy; nothing is simulated."""
    hardware = request.hardware
    for point in request.workloads():
        for tried in _tried(point, request):
            yield point.strategy, needed(tried, hardware).lacks(hardware)


def fits(request: Request) -> bool:
    """Whether any point of the grid fits; nothing is simulated."""
    return any(lack.fits for _, lack in shortfalls(request))


def _verdict(
    key: tuple[str, bool], points: list[Workload], request: Request, least_speed: float
) -> Verdict:
    """The verdict on a strategy, or on pipelines with FCDP inside their stages."""
    (strategy, inside), hardware = key, request.hardware
    families: dict[Workload, list[Workload]] = {}
    for point in points:
        families.setdefault(_plain(point), []).append(point)
    fitting = [each for family in families.values() for each in _family_fitting(family, request)]
    if not fitting:
        leanest = ((_leanest(one, hardware), one) for one in families.values())
        asked = chain.from_iterable([lean] if lean else family for lean, family in leanest)
        tried = (each for point in asked for each in _tried(point, request))
        lacking = (needed(each, hardware).lacks(hardware) for each in tried)
        least = min(lacking, key=lambda lack: lack.of_node(hardware.ranks_per_node))
        return Verdict(strategy, (), 0, least, inside)
    largest = max(workload.micro_batch for workload in fitting)
    if points[0].schedule.cut:  # one with less recomputation is faster
        fitting = [*{_plain(each): each for each in fitting[::-1]}.values()][::-1]
    if request.micro_batches and not least_speed:  # all that is named is shown
        options = tuple(simulated(workload, hardware) for workload in fitting)
    else:
        options = _options(_undominated(fitting, hardware), hardware, least_speed)
    return Verdict(strategy, options, largest, Shortfall(0.0, 0.0), inside)


class _Steps:
    """Steps of a search that were built, and the seconds for which they keep each resource busy.

    Neither recomputation, kernels nor the micro-batch's size change these, but for what blocks
    compute, so that many points share one list of tasks, those of a flip too, unless a policy goes
    by the memory in use.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware, self._known = hardware, _known_busy(hardware)
        self._built: dict[Workload, Built] = {}

    def built(self, point: Workload) -> Built:
        """The point's step."""
        if point not in self._built:
            self._built[point] = made = build(point, self._hardware)
            if not point.schedule.cut:
                busy = busy_seconds(made.tasks.tasks)
                own = busy["compute"] - self._own_seconds(point)
                self._known[self._key(point)] = busy | {"compute": own}
        return self._built[point]

    def most_per_s(self, point: Workload) -> float:
        """Tokens per second that no schedule of the point exceeds, by its busiest resource."""
        counted = _counted(point, self._hardware)
        more = point.accumulation - counted
        busy = self._busy(point.changed(accumulation=counted))
        fewer = self._busy(point.changed(accumulation=counted - 1)) if more else busy
        seconds = {name: of + more * (of - fewer.get(name, 0.0)) for name, of in busy.items()}
        seconds["compute"] += self._own_seconds(point)
        tokens = self._hardware.world_size * point.tokens * point.accumulation
        return tokens / max(seconds.values())

    def _busy(self, point: Workload) -> Mapping[str, float]:
        """Seconds by resource; of computation, those beside ``_own_seconds``."""
        if (key := self._key(point)) not in self._known:
            self.built(point)
        return self._known[key]

    def _key(self, point: Workload) -> Workload:
        """The point that stands for all that keep resources busy for as long."""
        if _goes_by_memory(point):
            return point
        alike = _plain(point).changed(micro_batch=1, kernels="flash")
        # The size of adapters' states tells which of them are gathered together.
        return alike if point.lora else alike.changed(states="fp32")

    def _own_seconds(self, point: Workload) -> float:
        """Seconds in which a rank's device computes blocks, the loss and the optimizer's step."""
        hardware, schedule = self._hardware, point.schedule
        passes = point.total(lambda each: overhead_seconds(each, hardware))
        once = _token_seconds(point, hardware) * point.tokens + 2 * passes
        mine = point.trained / schedule.sharers(*hardware.shape)
        step = adam_seconds(point, mine, hardware) if schedule.optimizer == "device" else 0.0
        adding = adding_seconds(point, hardware) * (point.accumulation - 1)
        return once * point.accumulation + adding + step


@lru_cache(maxsize=1)
def _known_busy(hardware: Hardware) -> dict[Workload, Mapping[str, float]]:
    """Busy seconds of a cluster's steps as ``_Steps`` finds them, for a plan and its flips."""
    return {}


def _options(fitting: list[Workload], hardware: Hardware, least: float) -> tuple[Option, ...]:
    """Simulate the most promising first, until no other can be taken; in the order given.

    What is taken is what would be if all were simulated. Those that cannot reach the ``least``
    tokens per second are left out.

    Bounds without tasks are cheap. A tighter one is computed only for the point that comes next by
    these: by its busiest resource, and then by its tasks if its micro-batches are few. A pipeline's
    first has all of this in it.
    """
    by_index: dict[int, Option] = {}
    steps = _Steps(hardware)
    waiting = [(-most_per_s(one, hardware), at, 0) for at, one in enumerate(fitting)]
    heapify(waiting)
    while waiting:
        bound, at, tight = heappop(waiting)
        point = fitting[at]
        if -bound < least:
            break
        most = max((one.tokens_per_s for one in by_index.values()), default=0.0)
        # A simpler point, which comes earlier, is taken even if it is a little slower.
        first = min((at for at, one in by_index.items() if one.as_fast(most)), default=at)
        if -bound <= most and (at > first or -bound < (1 - SAME) * most):
            continue
        alone = not (by_index or waiting or least)
        tightest = 1 if point.accumulation > _SIMULATED else 2
        if tight == tightest or alone or point.schedule.cut:
            by_index[at] = simulated(point, hardware, steps.built)
            continue
        tighter = most_tokens_per_s(steps.built(point)) if tight else steps.most_per_s(point)
        heappush(waiting, (max(bound, -tighter), at, tight + 1))
    return tuple(by_index[at] for at in sorted(by_index))


def _undominated(fitting: list[Workload], hardware: Hardware) -> list[Workload]:
    """The points but those that compute no less than an earlier one with the same micro-batches.

    Nothing else of their steps differs, but for sums on the host, which are copies more.
    """
    least: dict[Workload, float] = {}
    kept = []
    for point in fitting:
        alike = _plain(point).changed(partial_gradients="device")
        seconds = _token_seconds(point, hardware)
        if _goes_by_memory(point) or seconds < least.get(alike, math.inf):
            kept.append(point)
            least[alike] = seconds
    return kept


def _goes_by_memory(point: Workload) -> bool:
    """Whether the policy goes by the memory in use.

    The point may then need less with more activations, as less is kept on devices that are full.
    """
    return point.policy not in ONE_TIER


def _plain(point: Workload) -> Workload:
    """The point without recomputation."""
    return point.changed(recomputed=0.0, checkpointing="full")


def _leanest(family: Sequence[Workload], hardware: Hardware) -> Workload | None:
    """The point that takes the least memory, among those that differ in recomputation alone.

    It recomputes all blocks. ``None`` where no point does, where a policy goes by the memory in
    use, and where stages have less than two blocks in the mean: the activations of one are all
    there in backward, recomputed or not.
    """
    first = family[0]
    stages = hardware.nodes // first.nodes_per_stage * first.stages_per_node
    several = first.model.layers >= 2 * (stages if first.schedule.cut else 1)
    if not several or _goes_by_memory(first):
        return None
    all_blocks = (one for one in family if one.recomputed == 1 and one.checkpointing == "full")
    return next(all_blocks, None)


def _family_fitting(family: Sequence[Workload], request: Request) -> list[Workload]:
    """Points that differ in recomputation alone, each with the micro-batches that fit.

    A micro-batch that is too large with all blocks recomputed is not tried with fewer. One that
    fits does with more recomputation as well: a pipeline, of which all sizes count, is not asked
    for it again.
    """
    most: float = math.inf
    if leanest := _leanest(family, request.hardware):
        most = max((each.micro_batch for each in _fitting(leanest, request)), default=0)
    fitting: list[Workload] = []
    known: set[int] = set()
    for point in family if most else ():
        found = _fitting(point, request, known, most)
        fitting += found
        if point.schedule.cut:
            known.update(each.micro_batch for each in found)
    return fitting


def _fitting(
    point: Workload, request: Request, known: Collection[int] = (), most: float = math.inf
) -> list[Workload]:
    """The point with the micro-batches that fit, ``most`` sequences or fewer, largest first.

    Those ``known`` to fit are not asked for. Unless the request names them there is one: a larger
    micro-batch spreads a step's fixed costs over more tokens, so that none is faster than the
    largest.
    """
    hardware = request.hardware
    if not request.micro_batches and request.global_batch is None:
        largest = largest_micro_batch(point, hardware)
        return [point.changed(micro_batch=largest)] if largest else []
    tried = [each for each in _tried(point, request) if each.micro_batch <= most]
    # One micro-batch has no sums; a pipeline has those of all its groups.
    if point.partial_gradients != "device" and not point.schedule.cut:
        tried = [each for each in tried if each.accumulation > 1]

    def has_room(one: Workload) -> bool:
        return one.micro_batch in known or prediction.fits(one, hardware)

    # Several micro-batches leave sums of gradients, which one does not; of several, a larger one
    # takes no less memory.
    kinds = ([each for each in tried if (each.accumulation > 1) is more] for more in (False, True))
    if _goes_by_memory(point):
        kinds = ([*filter(has_room, sizes)] for sizes in kinds)
    else:
        kinds = (sizes[bisect_left(sizes, True, key=has_room) :] for sizes in kinds)
    found = chain.from_iterable(kinds)
    # More micro-batches leave a pipeline less to wait for.
    several = request.micro_batches or point.schedule.cut
    return [*found] if several else [*islice(found, 1)]


def _tried(point: Workload, request: Request) -> list[Workload]:
    """The point with each micro-batch that the request allows, largest first; else with 1."""
    whole = request.sequences_per_rank(point.sequence_length)
    sizes = request.micro_batches or ((1,) if whole is None else _divisors(whole))
    return [
        point.changed(micro_batch=size, accumulation=1 if whole is None else whole // size)
        for size in sorted(sizes, reverse=True)
    ]


@cache
def _divisors(whole: int) -> tuple[int, ...]:
    small = [n for n in range(1, isqrt(whole) + 1) if whole % n == 0]
    return (*small, *(whole // n for n in small if n * n != whole))

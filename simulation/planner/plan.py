"""The recommendation: which strategy, and why in one sentence; or why nothing fits.

Each remedy for what does not fit is tried in the memory model first.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from baselines.description import ENGINES
from baselines.registry import find, schedule_of
from baselines.settings import PipelineSettings
from simulation.hardware import Hardware
from simulation.memory import Shortfall
from simulation.pipeline import equal_tokens
from simulation.planner.request import Request, holds_packed
from simulation.planner.search import Option, Verdict, fits, search, shortfalls, tie
from simulation.planner.siblings import WAITS, InNetwork, in_network, out_of_core
from simulation.workload import Workload

#: Engines that need nothing but PyTorch.
_PYTORCH = ("fsdp2", "ddp")
#: Most strategies that are named as being as fast.
_LISTED = 4
_WAITS = WAITS | {
    "inter_node": "the link between nodes",
    "intra_node": "exchanges inside the node",
    "disk": "the disk",
    "cpu": "the optimizer on the CPU",
    "latency": "latencies",
}
#: Factors by which more nodes are tried, and shorter sequences.
_TIMES = (2, 4, 8, 16)
_LORA_RANK = 8


@dataclass(frozen=True)
class Flip:
    """The first option of a request under which another row would be taken, or none of them."""

    #: The option in words, or all of them.
    option: str
    #: The row that is taken then; ``None`` if none of the options changes it.
    taken: Verdict | None
    #: Its tokens per second there, over those of what is taken without the option; ``None`` where
    #: that does not fit, or is not known to hold such a base.
    times: float | None = None
    #: Whether the simulator cannot tell the two apart there.
    alike: bool = False

    def sentence(self, instead_of: Verdict) -> str:
        """Say what is taken in place of another row, and how much faster it is."""
        if self.taken is None:
            return f"none: {instead_of.name} is taken with {self.option} as well"
        much = f", where {instead_of.name} has no row"
        if self.times is not None:
            much = f", {self.times:.2f} times as fast as {instead_of.name} there"
        if self.alike:
            much += ": alike, and takes less"
        return f"with {self.option} {self.taken.name} would be taken{much}"


@dataclass(frozen=True)
class Plan:
    """The answer to a request: all strategies, and the one to take. Every figure is simulated."""

    request: Request
    #: Verdicts of strategies that fit, fastest first; then of the others, by what they lack.
    verdicts: tuple[Verdict, ...]
    taken: Verdict
    #: Why this one, in sentences of one decision.
    reason: str
    #: Names of those that the simulator cannot tell from it, itself among them.
    ties: tuple[str, ...]
    #: The change that another option would bring, if options were tried.
    flip: Flip | None = None
    #: LuWu, where there is a server and it fits.
    in_network: InNetwork | None = None

    @property
    def strategy(self) -> str:
        """The strategy to take."""
        return self.taken.strategy

    @property
    def option(self) -> Option:
        """Its best option."""
        assert self.taken.best is not None, "what is taken fits"
        return self.taken.best

    @property
    def fitting(self) -> list[Option]:
        """The best option of each strategy that fits, fastest first."""
        return [verdict.best for verdict in self.verdicts if verdict.best is not None]

    def hours(self, option: Option) -> float:
        """GPU-hours for the request's tokens."""
        world = self.request.hardware.world_size
        return self.request.tokens / option.tokens_per_s / 3600 * world

    def cost(self, option: Option) -> float | None:
        """Cost of the request's tokens, in the currency of its price; ``None`` without one."""
        price = self.request.price_per_gpu_hour
        return None if price is None else price * self.hours(option)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Hold off Python's collector, which would take a sixth of the time.

    Among a search's many small objects are no circles that it could free.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@_uncollected()
def plan(request: Request, *, flips: bool = False) -> Plan | None:
    """Search the grid; ``None`` if nothing fits (``refusal`` then says what would help).

    Where no length was given and nothing fits at the usual one, the plan is for half of it, or a
    quarter, and so on. With adapters it is for the longest at which a strategy with the base on
    the devices fits, if there is one. ``flips``: whether options that would change it are tried.
    """
    if request.usual_length is not None:
        request = _at_length(request)
    ranks = request.hardware.ranks_per_node
    verdicts = sorted(search(request), key=lambda one: (-speed(one), one.shortfall.of_node(ranks)))
    decided = _decide(verdicts)
    if decided is None:
        return None
    taken, ties = decided
    reason = _reason(request, taken, ties, verdicts)
    flip = _flip(request, taken) if flips else None
    names = tuple(one.name for one in ties)
    return Plan(request, tuple(verdicts), taken, reason, names, flip, in_network(request))


def speed(verdict: Verdict) -> float:
    """Tokens per second of a strategy's best option; 0 if it does not fit."""
    return 0.0 if verdict.best is None else verdict.best.tokens_per_s


def _decide(verdicts: Sequence[Verdict]) -> tuple[Verdict, list[Verdict]] | None:
    """Choose what to take, with all that is as fast; ``None`` if nothing fits.

    A strategy that does not train the same is taken only where nothing else fits. Of the fastest,
    and those closer to it than the simulator's own error, the one that takes least is taken.
    """
    fitting = [one for one in verdicts if one.best is not None]
    exact = [one for one in fitting if not differs(one.strategy)] or fitting
    if not exact:
        return None
    least = (1 - tie()) * max(map(speed, exact))
    ties = [one for one in exact if speed(one) >= least]
    return min(ties, key=lambda one: _plainness(one.strategy, one.fcdp_inside)), ties


def _flip(request: Request, taken: Verdict) -> Flip:
    """The first option, of those that change least, with which another row would be taken."""
    tried = []
    for option, changed in _options(replace(request, usual_length=None)):
        tried.append(option)
        found = _searched(changed, taken.strategy)
        decided = _decide(found)
        if decided is not None and decided[0].name != taken.name:
            other, ties = decided
            same = next((one for one in found if one.name == taken.name and speed(one)), None)
            times = None if same is None else speed(other) / speed(same)
            return Flip(option, other, times, same in ties)
    return Flip(", ".join(tried) or "all options", None)


def _searched(request: Request, first: str) -> list[Verdict]:
    """Verdicts that decide what is taken, fastest first; others are not simulated.

    The ``first`` strategy gives the speed that others must have to be taken in its place.
    """
    found: dict[str, tuple[Verdict, ...]] = {}
    plainest = sorted(request.answered, key=lambda name: (name != first, _plainness(name)))
    least = dict.fromkeys(plainest, math.inf)
    while True:
        verdicts = sorted(chain(*found.values()), key=speed, reverse=True)
        decided = _decide(verdicts)
        needed = {name: _least_that_matters(name, decided) for name in least}
        name = next((name for name in least if needed[name] < least[name]), None)
        if name is None:
            return verdicts
        least[name] = needed[name]
        found[name] = search(replace(request, strategies=(name,)), least=least[name])


def _least_that_matters(name: str, decided: tuple[Verdict, list[Verdict]] | None) -> float:
    """Tokens per second from which on a strategy changes what is decided."""
    if decided is None:
        return 0.0
    taken, ties = decided
    if differs(name) != differs(taken.strategy):
        return math.inf if differs(name) else 0.0
    if _plainness(name) <= _plainness(taken.strategy, taken.fcdp_inside):
        return (1 - tie()) * max(map(speed, ties))
    return speed(taken) / (1 - tie())


def _options(request: Request) -> Iterator[tuple[str, Request]]:
    """The request with one option changed, in words, the smallest change first."""
    if request.kernels != "fused":
        yield "--kernels fused", replace(request, kernels="fused")
    length, ranks = request.sequence_lengths[0], request.hardware.world_size
    batch = (request.sequences_per_rank(length) or 1) * ranks
    if request.global_batch is not None and batch % (2 * ranks) == 0 and not request.micro_batches:
        half = batch // 2
        yield (
            f"half the tokens per step (--global-batch {half})",
            replace(request, global_batch=half),
        )
    if request.lora_rank is None and request.states == "fp32":
        yield "--states int8", replace(request, states="int8")
    if request.lora_rank is not None and not request.packed:
        try:
            yield "--frozen-dtype nf4", replace(request, frozen_dtype="nf4")
        except ValueError:  # none of the strategies holds it
            return


def _at_length(request: Request) -> Request:
    """The request at the length that a plan is for, where nobody named one."""
    lengths = (request, *request.shorter())
    schedules = ((name, schedule_of(name)) for name in request.strategies)
    on_device = tuple(name for name, of in schedules if of.parameters == "device" == of.optimizer)
    longest = None
    if request.lora_rank is not None and on_device:
        longest = next((one for one in lengths if fits(replace(one, strategies=on_device))), None)
    return longest or next(filter(fits, lengths), request)


def differs(strategy: str) -> bool:
    """Whether results are not FSDP2's: what crosses nodes is rounded, or workers step apart."""
    return find(strategy).numerics != "exact"


def replicates(strategy: str) -> bool:
    """Whether what is frozen is whole on each rank or each node, so that it never crosses nodes."""
    return schedule_of(strategy).shards in ("rank", "node")


def _plainness(name: str, fcdp_inside: bool = False) -> tuple[int, int, bool, bool]:
    """Sort key, least for the plainest: what a strategy takes beyond sharding or replicating.

    Nothing; host memory, or a replica per node, which needs no cache; device memory for a cache; an
    optimizer on the CPU or on disk; a model that is cut. Then what PyTorch ships, this library,
    another framework; and what has a name of its own before a part of it.
    """
    strategy, schedule = find(name), schedule_of(name)
    if schedule.cut:
        takes = 4
    elif schedule.optimizer != "device" or schedule.parameters != "device":
        takes = 3
    elif schedule.cache == "device" or schedule.policy == "device":
        takes = 2
    elif schedule.shards == "node":
        takes = 1
    else:
        takes = 0 if schedule.cache is None or schedule.policy == "none" else 1
    return takes, ENGINES.index(strategy.engine), fcdp_inside, not strategy.title


def best(verdicts: Iterable[Verdict], is_one: Callable[[Verdict], bool]) -> Verdict | None:
    """The fastest of those that fit and of which this holds."""
    return max((one for one in verdicts if one.best and is_one(one)), key=speed, default=None)


def shown(verdicts: Sequence[Verdict], taken: Verdict) -> list[Verdict]:
    """The rows that every table has: what is taken, and the fastest of each kind that fits.

    Kinds are pipelines, what needs PyTorch alone, forms of FCDP, what is exact, and what is not.
    """
    kinds: tuple[Callable[[Verdict], bool], ...] = (
        lambda one: schedule_of(one.strategy).cut,
        lambda one: find(one.strategy).engine in _PYTORCH,
        lambda one: one.uses_fcdp,
        lambda one: not differs(one.strategy),
        lambda one: differs(one.strategy),
    )
    found = (best(verdicts, kind) for kind in kinds)
    return list(dict.fromkeys([taken, *filter(None, found)]))


def typed(workload: Workload) -> str:
    """Text to type for a form of FCDP: a call of the library, or a pipeline's settings."""
    if workload.schedule.cut:
        names = PipelineSettings.model_fields
        settings = ", ".join(f"{name}: {getattr(workload, name)}" for name in names)
        return f"strategy: pipeline, {settings} (in a matrix)"
    words = [f'policy="{workload.policy}"']
    if workload.schedule.parameters == "host":
        words.append("offload_policy=CPUOffloadPolicy()")
    if workload.accumulation > 1:
        words.append(f'comm=CommOptions(partial_gradients="{workload.partial_gradients}")')
    return f"fcdp.shard(model, topology, {', '.join(words)})"


def loading(workload: Workload, hardware: Hardware) -> str | None:
    """A clause on how to load the model of a form of FCDP, and what that takes of a node.

    ``None`` for pipelines and for parameters in host memory, of which no recipe is known.
    """
    if workload.schedule.cut or workload.schedule.parameters == "host":
        return None
    element = workload.sharded_bytes if workload.lora is None else workload.frozen_bytes
    model = workload.model.parameters * element / 1e9  # adapters are in no file
    whole = f"{hardware.ranks_per_node * model:,.1f}"
    if element < 2:  # four bits; float8 has shards in bf16
        return f"from_pretrained quantises it on each rank: {whole} GB a node"
    if workload.model.experts > 1:
        return f"from_pretrained fuses its experts on each rank: {whole} GB of host memory a node"
    return (
        "on meta, then each rank reads its own shards (fcdp.load_pretrained): at most "
        f"{model / hardware.nodes:,.1f} GB of host memory a node, not {whole} (from_pretrained on "
        "each rank)"
    )


def _reason(
    request: Request, taken: Verdict, ties: Sequence[Verdict], verdicts: Sequence[Verdict]
) -> str:
    parts = [_against(taken, verdicts)]
    about = _about_fcdp(request, taken, ties, verdicts)
    # Where replicas of a small base are enough, that comes first: nothing else need be read.
    first = request.lora_rank is not None and replicates(taken.strategy)
    parts[0 if first else len(parts) :] = about
    parts += _about_pipelines(request, taken, verdicts)
    others = [one.name for one in ties if one is not taken and not one.uses_fcdp]
    if others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        parts.append(f"as fast, within {tie():.0%}: {', '.join(others[:_LISTED])}{more}")
    return "; ".join(parts)


def _against(taken: Verdict, verdicts: Sequence[Verdict]) -> str:
    """A clause about what is taken next to plain ZeRO-3."""
    chosen = taken.best
    base = next((one.best for one in verdicts if one.strategy == "fsdp2"), None)
    assert chosen is not None, "what is taken fits"
    if taken.strategy == "fsdp2" or base is None:
        share = chosen.waits_seconds[chosen.bottleneck] / chosen.step_seconds
        return f"{taken.name} waits for {_WAITS[chosen.bottleneck]} in {share:.0%} of its step"
    times = chosen.tokens_per_s / base.tokens_per_s
    many = "as many" if f"{times:.3g}" == "1" else f"{times:.3g} times as many"
    text = f"{taken.name} trains {many} tokens a second as fsdp2"
    sent, least = base.sent_bytes_per_token, chosen.sent_bytes_per_token
    if least >= sent:
        return text
    whole = f"{float(f'{sent / 1e3:.3g}'):,g}"  # 1,030, not 1.03e+03
    return f"{text}: a node sends {least / 1e3:.3g} GB a million tokens, not {whole}"


def _about_fcdp(
    request: Request, taken: Verdict, ties: Sequence[Verdict], verdicts: Sequence[Verdict]
) -> list[str]:
    """Clauses about what FCDP is worth, of its best form; none where no form was asked for."""
    forms = [one for one in verdicts if one.uses_fcdp]
    if not forms:
        return []
    if taken.uses_fcdp:
        rival = best(verdicts, lambda one: not one.uses_fcdp and not differs(one.strategy))
        if rival is None:
            return ["without FCDP nothing fits that is exact"]
        return [f"without FCDP {rival.name} reaches {_percent(rival, taken)} of that"]
    if request.hardware.nodes == 1:
        return ["FCDP is worth nothing on one node: nothing crosses nodes"]
    form = best(forms, lambda one: True)
    if form is None or form.best is None:
        return [f"FCDP does not fit: it lacks {lacking(forms[0].shortfall)}"]
    host, needs = form.best.footprint.host.get("cache", 0.0) / 1e9, form.best.footprint.host_bytes
    more = taken.best is not None and needs > taken.best.footprint.host_bytes
    price = f" for its {host:.1f} GB of host memory a node" if host and more else ""
    share = _percent(form, taken)
    if request.lora_rank is not None and replicates(taken.strategy):
        whole = "GPU" if schedule_of(taken.strategy).shards == "rank" else "node"
        slower = "" if form in ties else f", and FCDP reaches {share} of its speed"
        base = f"with {taken.strategy} each {whole} holds all of the {request.frozen_dtype} base"
        return [f"FCDP is worth nothing here{price}: {base}{slower}"]
    if form in ties:
        return [f"FCDP gains nothing here{price}"]
    waits = _WAITS[form.best.bottleneck]
    return [f"FCDP's best form, {form.name}, reaches {share} of that, for {waits}"]


def _about_pipelines(request: Request, taken: Verdict, verdicts: Sequence[Verdict]) -> list[str]:
    """Clauses about a pipeline's price, and about tokens from which FCDP sends less."""
    cut, clauses = schedule_of(taken.strategy).cut, []
    if cut:
        whole = best(
            verdicts,
            lambda one: not schedule_of(one.strategy).cut and not differs(one.strategy),
        )
        uncut = "uncut, nothing that is exact fits"
        if whole is not None:
            uncut = f"uncut, {whole.name} reaches {_percent(whole, taken)}"
        clauses.append(
            "its price: the model is cut into stages, which the trainers of transformers, TRL and "
            f"accelerate do not run; {uncut}"
        )
    alone = next((one.best for one in verdicts if one.strategy == "fcdp"), None)
    if alone is None or not (cut or taken.uses_fcdp) or request.hardware.nodes == 1:
        return clauses
    of, ranks = alone.workload, request.hardware.world_size
    tokens = equal_tokens(of.trained, of.model.width, request.hardware.nodes)
    step = of.tokens * of.accumulation * ranks
    clauses.append(
        f"from {millions(tokens)} tokens per step on fcdp sends less than a pipeline (here "
        f"{millions(step)})"
    )
    return clauses


def _percent(of: Verdict, taken: Verdict) -> str:
    """The share of a row's speed that another reaches, in two digits."""
    return f"{float(f'{100 * speed(of) / speed(taken):.2g}'):g}%"


def millions(count: float) -> str:
    """A count of tokens, such as ``1.3 M`` or ``12 k``."""
    scale, unit = (1e6, "M") if count >= 1e6 / 2 else (1e3, "k")
    return f"{float(f'{count / scale:.2g}'):g} {unit}"


def refusal(request: Request) -> str:
    """The smallest shortfall, and what would help, for a request of which nothing fits."""
    lacks = [*shortfalls(request)]
    ranks = request.hardware.ranks_per_node
    strategy, least = min(lacks, key=lambda pair: pair[1].of_node(ranks))
    remedies = [*_remedies(request, [lack for _, lack in lacks])]
    remedies += [str(made) for made in (out_of_core(request), in_network(request)) if made]
    return (
        f"nothing fits {request.hardware.name}: the closest, {strategy}, lacks {lacking(least)}; "
        f"what would help: {', or '.join(remedies) or 'GPUs with more memory'}"
    )


def lacking(lack: Shortfall) -> str:
    """A shortfall in words, in GB."""
    parts = (
        (lack.device_bytes, "GB on each device"),
        (lack.host_bytes, "GB of host memory on each node"),
    )
    return " and ".join(f"{nbytes / 1e9:.1f} {what}" for nbytes, what in parts if nbytes)


def _remedies(request: Request, lacks: Sequence[Shortfall]) -> Iterator[str]:
    """Changes of the request with which something fits, in words; of a kind the smallest."""
    hardware, batch = request.hardware, request.global_batch
    more = (
        replace(
            request,
            hardware=replace(hardware, nodes=times * hardware.nodes),
            global_batch=times * batch if isinstance(batch, int) else batch,
        )
        for times in _TIMES
    )
    if (larger := next(filter(_fits, more), None)) is not None:
        yield f"{larger.hardware.nodes} nodes"
    if hosts := [lack.host_bytes for lack in lacks if lack.device_bytes == 0]:
        needed = hardware.host_memory_bytes + min(hosts)
        yield f"{needed / 1e9:.1f} GB of host memory a node"
    lengths = (min(request.sequence_lengths) // times for times in _TIMES)
    fewer = (replace(request, sequence_lengths=(length,)) for length in lengths if length)
    if (shorter := next(filter(fits, fewer), None)) is not None:
        yield f"sequences of {shorter.sequence_lengths[0]} tokens"
    if request.lora_rank is None and _fits(replace(request, lora_rank=_LORA_RANK)):
        yield f"adapters in place of all parameters (--peft lora:{_LORA_RANK})"
    holds = any(map(holds_packed, request.strategies))
    wide = request.lora_rank is not None and not request.packed
    if wide and holds and _fits(replace(request, frozen_dtype="nf4")):
        yield "a base in four bits (--frozen-dtype nf4)"
    if request.kernels != "fused" and _fits(replace(request, kernels="fused")):
        yield "fused norms, activation functions and loss (--kernels fused)"


def _fits(request: Request) -> bool:
    """Whether a plan has an answer: by the shortest length that it tries, which takes least."""
    return fits([request, *request.shorter()][-1])

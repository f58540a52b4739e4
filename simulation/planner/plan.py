"""The recommendation: which strategy, and why in one sentence; or why nothing fits.

Each remedy for what does not fit is tried in the memory model first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baselines.description import ENGINES, Strategy
from baselines.registry import find, schedule_of
from simulation.memory import Shortfall
from simulation.planner.request import GATHERS_FOUR_BITS, Request
from simulation.planner.search import Option, Verdict, fits, search, shortfalls, tie
from simulation.planner.siblings import WAITS, InNetwork, in_network, out_of_core

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
class Plan:
    """The answer to a request: all strategies, and the one to take. Every figure is simulated."""

    request: Request
    #: Verdicts of strategies that fit, fastest first; then of the others, by what they lack.
    verdicts: tuple[Verdict, ...]
    strategy: str
    option: Option
    #: Why this strategy, in one sentence.
    reason: str
    #: Strategies that the simulator cannot tell from it.
    ties: tuple[str, ...]
    #: LuWu, where there is a server and it fits.
    in_network: InNetwork | None = None

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


def plan(request: Request) -> Plan | None:
    """Search the grid; ``None`` if nothing fits (``refusal`` then says what would help).

    Where no length was given and nothing fits at the usual one, the plan is for half of it, or a
    quarter, and so on. With adapters it is for the longest at which a strategy with the base on
    the devices fits, if there is one.
    """
    if request.usual_length is not None:
        request = _at_length(request)
    ranks = request.hardware.ranks_per_node
    verdicts = sorted(
        search(request),
        key=lambda one: (-one.best.tokens_per_s if one.best else 0.0, one.shortfall.of_node(ranks)),
    )
    fitting = {verdict.strategy: verdict.best for verdict in verdicts if verdict.best is not None}
    if not fitting:
        return None
    # A strategy that does not train the same is taken only where nothing else fits.
    exact = {name: option for name, option in fitting.items() if not differs(name)} or fitting
    # The fastest, and those as fast: closer than the simulator's own error.
    least = (1 - tie()) * max(option.tokens_per_s for option in exact.values())
    ties = {name: option for name, option in exact.items() if option.tokens_per_s >= least}
    strategy = min(ties, key=lambda name: _plainness(find(name)))
    by_name = {verdict.strategy: verdict for verdict in verdicts}
    reason = _reason(request, strategy, ties, fitting, by_name)
    luwu = in_network(request)
    return Plan(request, tuple(verdicts), strategy, fitting[strategy], reason, tuple(ties), luwu)


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


def _plainness(strategy: Strategy) -> tuple[int, int, bool]:
    """Sort key, least for the plainest: what a strategy takes beyond sharding or replicating.

    Nothing; host memory, or a replica per node, which needs no cache; device memory for a cache; an
    optimizer on the CPU or on disk. Then what PyTorch ships, this library, another framework; and
    what has a name of its own before a part of it.
    """
    schedule = schedule_of(strategy.name)
    if schedule.optimizer != "device" or schedule.parameters != "device":
        takes = 3
    elif schedule.cache == "device" or schedule.policy == "device":
        takes = 2
    elif schedule.shards == "node":
        takes = 1
    else:
        takes = 0 if schedule.cache is None or schedule.policy == "none" else 1
    return takes, ENGINES.index(strategy.engine), not strategy.title


def _reason(
    request: Request,
    strategy: str,
    ties: dict[str, Option],
    fitting: dict[str, Option],
    verdicts: dict[str, Verdict],
) -> str:
    chosen = fitting[strategy]
    parts = [_against(strategy, chosen, fitting)]
    if strategy != "fcdp" and "fcdp" in verdicts:
        tied = "fcdp" in ties
        clause = _about_fcdp(request, strategy, chosen, tied, verdicts["fcdp"])
        # Where replicas of a small base are enough, that comes first: nothing else need be read.
        first = request.lora_rank is not None and replicates(strategy)
        parts.insert(0 if first else len(parts), clause)
    others = [name for name in ties if name not in (strategy, "fcdp")]
    if others:
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        parts.append(f"as fast, within {tie():.0%}: {', '.join(others[:_LISTED])}{more}")
    return "; ".join(parts)


def _against(strategy: str, chosen: Option, fitting: dict[str, Option]) -> str:
    """A clause about the chosen strategy next to plain ZeRO-3."""
    base = fitting.get("fsdp2")
    if strategy == "fsdp2" or base is None:
        share = chosen.waits_seconds[chosen.bottleneck] / chosen.step_seconds
        return f"{strategy} waits for {_WAITS[chosen.bottleneck]} in {share:.0%} of its step"
    times = chosen.tokens_per_s / base.tokens_per_s
    many = "as many" if f"{times:.3g}" == "1" else f"{times:.3g} times as many"
    text = f"{strategy} trains {many} tokens a second as fsdp2"
    sent, least = base.sent_bytes_per_token, chosen.sent_bytes_per_token
    if least >= sent:
        return text
    whole = f"{float(f'{sent / 1e3:.3g}'):,g}"  # 1,030, not 1.03e+03
    return f"{text}: a node sends {least / 1e3:.3g} GB a million tokens, not {whole}"


def _about_fcdp(
    request: Request, strategy: str, chosen: Option, tied: bool, verdict: Verdict
) -> str:
    best = verdict.best
    if request.hardware.nodes == 1:
        return "FCDP is worth nothing on one node: nothing crosses nodes"
    if best is None:
        return f"FCDP does not fit: it lacks {lacking(verdict.shortfall)}"
    host = best.footprint.host.get("cache", 0.0) / 1e9
    price = f" for its {host:.1f} GB of host memory a node" if host else ""
    share = best.tokens_per_s / chosen.tokens_per_s
    if request.lora_rank is not None and replicates(strategy):
        whole = "GPU" if schedule_of(strategy).shards == "rank" else "node"
        slower = "" if tied else f", and FCDP reaches {share:.0%} of its speed"
        base = f"with {strategy} each {whole} holds all of the {request.frozen_dtype} base{slower}"
        return f"FCDP is worth nothing here{price}: {base}"
    if tied:
        return f"FCDP gains nothing here{price}"
    return (
        f"FCDP is not the best here: it reaches {share:.0%} of that, for {_WAITS[best.bottleneck]}"
    )


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
    if (larger := next(filter(fits, more), None)) is not None:
        yield f"{larger.hardware.nodes} nodes"
    if hosts := [lack.host_bytes for lack in lacks if lack.device_bytes == 0]:
        needed = hardware.host_memory_bytes + min(hosts)
        yield f"{needed / 1e9:.1f} GB of host memory a node"
    lengths = (min(request.sequence_lengths) // times for times in _TIMES)
    fewer = (replace(request, sequence_lengths=(length,)) for length in lengths if length)
    if (shorter := next(filter(fits, fewer), None)) is not None:
        yield f"sequences of {shorter.sequence_lengths[0]} tokens"
    if request.lora_rank is None and fits(replace(request, lora_rank=_LORA_RANK)):
        yield f"adapters in place of all parameters (--peft lora:{_LORA_RANK})"
    holds = any(find(name).engine in GATHERS_FOUR_BITS for name in request.strategies)
    wide = request.lora_rank is not None and not request.four_bits
    if wide and holds and fits(replace(request, frozen_dtype="nf4")):
        yield "a base in four bits (--frozen-dtype nf4)"
    if request.kernels != "fused" and fits(replace(request, kernels="fused")):
        yield "fused norms, activation functions and loss (--kernels fused)"

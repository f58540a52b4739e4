"""Instances that clouds rent out, or nodes of one's own; and offers of them, cheapest first.

An offer has the fewest nodes of its kind that train so many tokens in time. Offers are printed as
a table, or written as JSON or as rows of a CSV file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import Any

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from simulation import goodput
from simulation.compute import with_rates
from simulation.files import Strict, rows_of, validated
from simulation.hardware import Hardware, cluster, gpu, reported
from simulation.planner.plan import Plan, differs, plan, refusal
from simulation.planner.report import EVIDENCE, titles
from simulation.planner.request import Request
from simulation.planner.search import tokens_range
from simulation.workload import token_work

TABLE = Path(__file__).parents[2] / "results" / "instances" / "instances.csv"
#: The table of public clouds, in place of a file.
ALL = "all"
_GIB = 2**30
#: Host memory where the source gives none: too little for offloaded states or a cache.
_HOST_MEMORY_BYTES = 1e9
#: Strategies that are tried where none are named: what people use, and FCDP.
STRATEGIES = ("ddp", "fsdp2", "fsdp2-hsdp", "fcdp", "deepspeed-hpz", "fsdp2-offload")
#: Most offers: an instance that cannot be cheaper than the last of them is not simulated.
MOST = 10
#: Standard deviations from the mean to an end of a range that holds nine of ten.
_NINE_OF_TEN = NormalDist().inv_cdf(0.95)
#: Reasons for which an instance has no offer, in words.
WHY = {
    "dearer": f"not one of the {MOST} cheapest, and not simulated",
    "unpriced": "without a price in the table",
    "unfit": "nothing fits",
    "late": "nothing is in time",
    "uneven": "whose GPUs the global batch cannot be shared out to",
}


class Instance(Strict):
    """A line of the table. What its source does not say is empty."""

    provider: str
    instance: str
    gpu: str
    gpus: int = Field(ge=1)
    #: Nominal bandwidth to other nodes; without it only one node is planned.
    nic_gbit_s: float | None = Field(default=None, gt=0)
    host_memory_gib: float | None = Field(default=None, gt=0)
    list_usd_per_hour: float | None = Field(default=None, ge=0)
    spot_usd_per_hour: float | None = Field(default=None, ge=0)
    #: Date of the prices, and where they are published.
    as_of: str = ""
    source: str = ""
    note: str = ""
    #: Most nodes that there are.
    nodes: int = Field(default=64, ge=1)
    #: Sizes of pods, such as ``2 4 8``, which cost so many times as much.
    pods: str = ""

    @property
    def name(self) -> str:
        """The instance with its provider, as tables have it."""
        return f"{self.provider} {self.instance}"

    @property
    def prices(self) -> dict[bool, float]:
        """Dollars per hour, of those that are known, by whether they are of spot instances."""
        known = {False: self.list_usd_per_hour, True: self.spot_usd_per_hour}
        return {spot: price for spot, price in known.items() if price is not None}

    def sized(self) -> Iterator[Instance]:
        """The instance, and the pods that there are of it."""
        yield self
        for size in map(int, self.pods.split()):
            fields = ("gpus", "host_memory_gib", "list_usd_per_hour", "spot_usd_per_hour")
            values = {name: getattr(self, name) for name in fields}
            more = {name: value and size * value for name, value in values.items()}
            name = f"{size}x {self.instance}"
            yield self.model_copy(update={**more, "instance": name, "pods": ""})

    @property
    def most_nodes(self) -> int:
        """Most nodes that can be planned."""
        return 1 if self.nic_gbit_s is None else self.nodes

    def cluster(self, nodes: int) -> Hardware:
        """A cluster of so many, by data sheets, fitted rates and the memory that cards report."""
        memory = self.host_memory_gib
        hardware = cluster(
            self.gpu,
            nodes=nodes,
            ranks_per_node=self.gpus,
            inter_bits_per_s=float("inf") if nodes == 1 else 1e9 * (self.nic_gbit_s or 0),
            host_memory_bytes=_HOST_MEMORY_BYTES if memory is None else memory * _GIB,
        )
        return with_rates(reported(hardware))


def read(source: str | Path) -> list[Instance]:
    """The table (``all``), a CSV file of its form, or a YAML file with a list of such mappings.

    Raises ``ValueError`` naming the file, the line and the field.
    """
    path = TABLE if source == ALL else Path(source)
    if not path.is_file():
        raise ValueError(f"instances = {str(source)!r}: allowed are {ALL}, and a CSV or YAML file")
    lines: Iterator[tuple[str, Any]] = rows_of(path)
    if path.suffix in (".yaml", ".yml"):
        from simulation.yaml_lines import load

        document = load(path)
        if not isinstance(document.values, list):
            document.fail((), "must be a list of instances")
        lines = ((document.place((at,)), values) for at, values in enumerate(document.values))
    instances: list[Instance] = []
    for where, values in lines:
        instance = validated(Instance, values, where)
        try:
            gpu(instance.gpu)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        instances += instance.sized()
    return instances


def named(name: str, source: str | Path = ALL) -> Instance:
    """The instance of that name, of the first provider. Raises ``ValueError`` if there is none."""
    instances = read(source)
    for instance in instances:
        if instance.instance == name:
            return instance
    names = ", ".join(sorted({instance.instance for instance in instances}))
    raise ValueError(f"instance = {name!r}: allowed are {names}")


@dataclass(frozen=True)
class Offer:
    """So many instances at one price, and what the tokens take and cost there."""

    instance: Instance
    plan: Plan
    #: Whether the cloud may take the instances back.
    spot: bool
    #: Share of the time that trains.
    goodput: float

    @property
    def hardware(self) -> Hardware:
        return self.plan.request.hardware

    @property
    def name(self) -> str:
        return f"{self.hardware.nodes} × {self.instance.name}"

    @property
    def price(self) -> float:
        """Dollars per hour of all nodes."""
        return self.instance.prices[self.spot] * self.hardware.nodes

    @property
    def hours(self) -> float:
        return self._hours(self.plan.option.tokens_per_s)

    @property
    def cost(self) -> float:
        return self.price * self.hours

    @property
    def cost_range(self) -> tuple[float, float]:
        """Costs between which nine of ten such runs are expected, failures aside."""
        slowest, fastest = tokens_range(self.plan.option, self.plan.request)
        return self.price * self._hours(fastest), self.price * self._hours(slowest)

    def chance(self, within_hours: float) -> float:
        """Probability of being done in time, if the range's ends are those of nine of ten runs."""
        fast = self.hours / within_hours
        slowest, fastest = tokens_range(self.plan.option, self.plan.request)
        end = (slowest if fast < 1 else fastest) / self.plan.option.tokens_per_s
        return NormalDist().cdf(-_NINE_OF_TEN * log(fast) / abs(log(end)))

    def _hours(self, tokens_per_s: float) -> float:
        return self.plan.request.tokens / tokens_per_s / 3600 / self.goodput


@dataclass(frozen=True)
class Market:
    """The offers that were found, cheapest first, and what was left out."""

    offers: tuple[Offer, ...]
    #: Names of the instances without an offer, by the reason.
    left_out: Mapping[str, Sequence[str]]
    #: The late offer that would be done first.
    soonest: Offer | None


def rent(request: Request, instances: Sequence[Instance], within_hours: float | None) -> Market:
    """Offers for the request's tokens; its hardware is each instance's in turn.

    Raises ``ValueError`` as a request does.
    """
    # Sequences of one length everywhere: offers are compared.
    request = replace(request, usual_length=None)
    #: The least cost of each, if it computes and does nothing else.
    priced = [
        (min(one.prices.values()) * _least_hours(request, one), one)
        for one in instances
        if one.prices
    ]
    cheapest: list[Offer] = []
    left_out: dict[str, list[str]] = {why: [] for why in WHY}
    left_out["unpriced"] = [one.name for one in instances if not one.prices]
    soonest: list[Offer] = []
    for least, instance in sorted(priced, key=lambda pair: pair[0]):
        if len(cheapest) >= MOST and least > cheapest[MOST - 1].cost:
            left_out["dearer"].append(instance.name)
            continue
        offers, late, why = _try(request, instance, within_hours)
        if why is not None:
            left_out[why].append(instance.name)
        soonest += late
        cheapest = sorted([*cheapest, *offers], key=lambda offer: offer.cost)
    first = min(soonest, key=lambda offer: offer.hours, default=None)
    return Market(tuple(cheapest[:MOST]), left_out, first)


def refused(market: Market, request: Request, instances: Sequence[Instance]) -> str:
    """Say why there is no offer, and what would help, in one sentence for each reason."""
    parts = []
    late, unfit = (
        [one for one in instances if one.name in market.left_out[why]] for why in ("late", "unfit")
    )
    if late:
        parts.append(f"{len(late)} of {len(instances)} kinds of instances are late: ")
        if (offer := market.soonest) is not None:
            parts[-1] += f"the soonest, {offer.name}, takes {offer.hours:,.3g} hours"
        else:
            hours, name = min(
                (_least_hours(request, one) / one.most_nodes, f"{one.most_nodes} × {one.name}")
                for one in late
            )
            parts[-1] += f"the soonest, {name}, would compute for {hours:,.3g} hours alone"
    if uneven := market.left_out["uneven"]:
        parts.append(
            f"global_batch = {request.global_batch}: is no multiple of the GPUs, with each "
            f"micro-batch, of {', '.join(uneven)}"
        )
    if unfit:
        clusters = [one.cluster(one.most_nodes) for one in unfit]
        largest = max(clusters, key=lambda one: one.world_size * one.device.memory_bytes)
        parts.append(
            f"on {len(unfit)} of {len(instances)} kinds of instances nothing fits, on the largest: "
            + refusal(replace(request, hardware=largest))
        )
    if unpriced := market.left_out["unpriced"]:
        parts.append(f"{WHY['unpriced']}: {', '.join(unpriced)}")
    return "no offer: " + "; ".join(parts)


def _try(
    request: Request, instance: Instance, within_hours: float | None
) -> tuple[list[Offer], list[Offer], str | None]:
    """Offers of the fewest nodes in time, by price; else the soonest, and why there is none."""

    @cache
    def planned(nodes: int) -> Plan | None:
        return plan(replace(request, hardware=instance.cluster(nodes)))

    # Powers of two that computation alone does not rule out.
    counts = [2**power for power in range(instance.most_nodes.bit_length())]
    if within_hours is not None:
        hours = _least_hours(request, instance)
        counts = [nodes for nodes in counts if hours / nodes <= within_hours]
    even = [nodes for nodes in counts if _shares_out(request, instance.cluster(nodes))]
    offers: list[Offer] = []
    late: list[Offer] = []
    for spot in instance.prices:
        made: list[Offer] = []
        for answer in filter(None, map(planned, even)):
            share = goodput.of(answer.option.workload, answer.request.hardware, spot=spot)
            made.append(Offer(instance, answer, spot, share))
            if within_hours is None or made[-1].hours <= within_hours:
                offers.append(made[-1])
                break
        else:
            late += sorted(made, key=lambda offer: offer.hours)[:1]
    why = None
    if not offers:
        why = "late" if late or not counts else "unfit" if even else "uneven"
    return offers, late, why


def _shares_out(request: Request, hardware: Hardware) -> bool:
    """Whether ranks get equally many sequences of a step, in micro-batches of a named size."""
    if not isinstance(request.global_batch, int):
        return True
    count, rest = divmod(request.global_batch, hardware.world_size)
    return count > 0 and rest == 0 and not any(count % size for size in request.micro_batches)


def _least_hours(request: Request, instance: Instance) -> float:
    """Hours of one node if it computed and did nothing else, and nothing twice."""
    hardware = instance.cluster(1)
    simplest = replace(request, hardware=hardware, global_batch=None, micro_batches=())
    seconds = min(
        hardware.seconds(token_work(replace(point, recomputed=0.0)))
        for point in simplest.workloads()
    )
    return request.tokens * seconds / hardware.world_size / 3600


def table(market: Market, request: Request, within_hours: float | None) -> RenderableType:
    """Offers for a terminal, cheapest first, and what was left out."""
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("rent\n", "price\n", "strategy\n"):
        grid.add_column(name, no_wrap=name == "price\n", overflow="fold")
    for name in ("hours\n", "cost\n$", "range\n$", "in\ntime"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("prices\nas of", no_wrap=True)
    for offer in market.offers:
        low, high = offer.cost_range
        grid.add_row(
            offer.name,
            "spot" if offer.spot else "list",
            offer.plan.strategy,
            f"{offer.hours:,.1f}",
            f"{offer.cost:,.0f}",
            f"{low:,.0f}–{high:,.0f}",
            "" if within_hours is None else f"{offer.chance(within_hours):.0%}",
            offer.instance.as_of,
        )
    deadline = "" if within_hours is None else f" within {within_hours:g} hours"
    head = Text(
        f"{titles(request)[0]} · {request.tokens:.3g} tokens in all{deadline} · {EVIDENCE}",
        style="bold cyan",
    )
    lines = [
        Text(f"{WHY[why]}: {', '.join(names)}", style="dim")
        for why, names in market.left_out.items()
        if names
    ]
    risk = Text(
        f"failures: one in {goodput.GPU_HOURS_PER_FAILURE:,.0f} GPU-hours; a spot instance is "
        f"taken back after {goodput.SPOT_HOURS:g} hours in the mean (ours); "
        "checkpoints as often as is best",
        style="dim",
    )
    then = Text("next, on one of them: python -m experiments preflight", style="dim")
    return Group(head, Text(), grid, Text(), *lines, risk, then)


def document(market: Market, request: Request, within_hours: float | None) -> dict[str, Any]:
    """The offers for JSON."""
    return {
        "evidence": EVIDENCE,
        "model": request.model,
        "tokens": request.tokens,
        "within_hours": within_hours,
        "offers": [row(offer) for offer in market.offers],
        **market.left_out,
    }


def row(offer: Offer) -> dict[str, Any]:
    """One offer, flat."""
    low, high = offer.cost_range
    instance, option = offer.instance, offer.plan.option
    return {
        "provider": instance.provider,
        "instance": instance.instance,
        "nodes": offer.hardware.nodes,
        "gpus": offer.hardware.world_size,
        "gpu": instance.gpu,
        "price": "spot" if offer.spot else "list",
        "usd_per_hour": offer.price,
        "strategy": offer.plan.strategy,
        "exact": not differs(offer.plan.strategy),
        "sequence_length": option.workload.sequence_length,
        "micro_batch": option.workload.micro_batch,
        "tokens_per_s": option.tokens_per_s,
        "hours": offer.hours,
        "cost_usd": offer.cost,
        "least_cost_usd": low,
        "most_cost_usd": high,
        "goodput": offer.goodput,
        "as_of": instance.as_of,
        "source": instance.source,
    }

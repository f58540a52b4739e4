"""What to rent: for each kind of instance the fewest nodes that train so many tokens in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from simulation import goodput
from simulation.hardware import Hardware
from simulation.instances import Instance
from simulation.planner import ranges
from simulation.planner.plan import Plan, plan
from simulation.planner.request import Request
from simulation.work import token_work

#: Strategies that are tried where none are named: what people use, and FCDP.
STRATEGIES = ("ddp", "fsdp2", "fsdp2-hsdp", "fcdp", "deepspeed-hpz", "fsdp2-offload")
#: Offers that are kept: what cannot be cheaper than the last of them is not simulated.
MOST = 12


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
    def price(self) -> float:
        """Dollars per hour of all nodes."""
        one = self.instance.spot_usd_per_hour if self.spot else self.instance.list_usd_per_hour
        assert one is not None, "an offer has a price"
        return one * self.hardware.nodes

    @property
    def hours(self) -> float:
        return self._hours(self.plan.option.tokens_per_s)

    @property
    def cost(self) -> float:
        return self.price * self.hours

    @property
    def cost_range(self) -> tuple[float, float]:
        """Costs between which nine of ten such runs are expected, failures aside."""
        slowest, fastest = ranges.tokens_per_s(self.plan.option.speed, self.hardware)
        return self.price * self._hours(fastest), self.price * self._hours(slowest)

    def _hours(self, tokens_per_s: float) -> float:
        return self.plan.request.tokens / tokens_per_s / 3600 / self.goodput


@dataclass(frozen=True)
class Market:
    """The offers that were found, cheapest first, and what was left out."""

    offers: tuple[Offer, ...]
    #: Instances that cannot be cheaper than the last offer, that have no price, and on which
    #: nothing fits or is in time.
    dearer: tuple[str, ...]
    unpriced: tuple[str, ...]
    unfit: tuple[str, ...]


def rent(request: Request, instances: Sequence[Instance], within_hours: float | None) -> Market:
    """Offers for the request's tokens; its hardware is each instance's in turn.

    Raises ``ValueError`` as a request does.
    """
    # Sequences of one length everywhere: offers are compared.
    request = replace(request, usual_length=None)
    priced = [one for one in instances if _prices(one)]
    by_cost = sorted(priced, key=lambda one: _least_cost(request, one))
    found: list[Offer] = []
    dearer, unfit = [], []
    for instance in by_cost:
        if len(found) >= MOST and _least_cost(request, instance) > found[MOST - 1].cost:
            dearer.append(_name(instance))
            continue
        offers = list(_offers(request, instance, within_hours))
        if not offers:
            unfit.append(_name(instance))
        found = sorted([*found, *offers], key=lambda offer: offer.cost)
    unpriced = [_name(one) for one in instances if not _prices(one)]
    return Market(tuple(found[:MOST]), tuple(dearer), tuple(unpriced), tuple(unfit))


def _offers(request: Request, instance: Instance, within_hours: float | None) -> Iterator[Offer]:
    """The fewest nodes in time, at each of the instance's prices."""
    for spot in (False, True):
        price = instance.spot_usd_per_hour if spot else instance.list_usd_per_hour
        if price is None:
            continue
        for nodes in _node_counts(request, instance, within_hours):
            hardware = instance.cluster(nodes)
            batch = request.global_batch
            if batch is not None and batch % hardware.world_size:
                continue
            made = plan(replace(request, hardware=hardware))
            if made is None:
                continue
            share = goodput.of(made.option.workload, hardware, spot=spot)
            offer = Offer(instance, made, spot, share)
            if within_hours is None or offer.hours <= within_hours:
                yield offer
                break


def _node_counts(request: Request, instance: Instance, within_hours: float | None) -> Iterator[int]:
    """Powers of two that computation alone does not rule out."""
    nodes = 1
    while nodes <= instance.most_nodes:
        if within_hours is None or _least_hours(request, instance) / nodes <= within_hours:
            yield nodes
        nodes *= 2


def _least_hours(request: Request, instance: Instance) -> float:
    """Hours of one node if it computed and did nothing else, and nothing twice."""
    hardware = instance.cluster(1)
    simplest = replace(request, hardware=hardware, global_batch=None, micro_batches=())
    seconds = min(
        hardware.seconds(token_work(replace(point, recomputed=0.0)))
        for point in simplest.workloads()
    )
    return request.tokens * seconds / hardware.world_size / 3600


def _least_cost(request: Request, instance: Instance) -> float:
    return min(_prices(instance)) * _least_hours(request, instance)


def _prices(instance: Instance) -> list[float]:
    prices = (instance.list_usd_per_hour, instance.spot_usd_per_hour)
    return [price for price in prices if price is not None]


def _name(instance: Instance) -> str:
    return f"{instance.provider} {instance.instance}"

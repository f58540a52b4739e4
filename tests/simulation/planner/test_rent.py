"""What to rent: cheapest first, in time, and no cheaper offer left out."""

from __future__ import annotations

from typing import Any

import pytest

from simulation.instances import Instance
from simulation.planner import rent as module
from simulation.planner.rent import Market, rent
from simulation.planner.request import Request


def instance(name: str, **changes: Any) -> Instance:
    said = {"provider": "p", "gpu": "a100-80gb", "gpus": 8, "nic_gbit_s": 400, "nodes": 8}
    return Instance(instance=name, **(said | {"list_usd_per_hour": 20.0} | changes))


def market(*instances: Instance, within: float | None = None, **changes: Any) -> Market:
    settings: dict[str, Any] = {
        "model": "llama-3-8b",
        "lora_rank": 8,
        "sequence_lengths": (2048,),
        "strategies": ("ddp", "fsdp2"),
        "recomputed": (0.0, 1.0),
        "tokens": 1e9,
        **changes,
    }
    request = Request(hardware=instances[0].cluster(1), **settings)
    return rent(request, instances, within)


def test_cheapest_first_and_costs_follow_from_prices() -> None:
    found = market(instance("dear", list_usd_per_hour=30), instance("cheap"))
    assert [offer.instance.instance for offer in found.offers] == ["cheap", "dear"]
    cheap, dear = found.offers
    assert dear.cost == pytest.approx(1.5 * cheap.cost)
    low, high = cheap.cost_range
    assert low < cheap.cost < high
    assert cheap.cost == pytest.approx(20 * cheap.hours)


def test_a_deadline_takes_more_nodes_or_leaves_out() -> None:
    alone, several = instance("alone", nic_gbit_s=None), instance("several")
    (first, *_) = market(alone, several).offers
    found = market(alone, several, within=first.hours / 3)
    assert [offer.instance.instance for offer in found.offers] == ["several"]
    assert found.offers[0].hardware.nodes == 4
    assert found.unfit == ("p alone",)


def test_spot_is_cheaper_and_slower() -> None:
    found = market(
        instance("both", spot_usd_per_hour=6.0), instance("none", list_usd_per_hour=None)
    )
    spot, listed = found.offers
    assert (spot.spot, listed.spot) == (True, False)
    assert spot.goodput < listed.goodput < 1
    assert spot.hours > listed.hours
    assert spot.cost < listed.cost
    assert found.unpriced == ("p none",)


def test_what_is_not_simulated_is_not_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [instance(f"at {price}", list_usd_per_hour=float(price)) for price in (20, 22, 60)]
    whole = [offer.instance.instance for offer in market(*several).offers]
    monkeypatch.setattr(module, "MOST", 2)
    found = market(*several)
    assert [offer.instance.instance for offer in found.offers] == whole[:2]
    assert found.dearer == ("p at 60",)

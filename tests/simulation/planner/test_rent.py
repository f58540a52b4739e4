"""What to rent: cheapest first, in time, and no cheaper offer left out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from simulation.planner import rent as module
from simulation.planner.rent import Instance, Market, refused, rent
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
    hardware = replace(instances[0].cluster(1), ranks_per_node=1)
    request = Request(hardware=hardware, **settings)
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
    assert found.left_out["late"] == ["p alone"]


def test_spot_is_cheaper_and_slower() -> None:
    found = market(
        instance("both", spot_usd_per_hour=6.0), instance("none", list_usd_per_hour=None)
    )
    spot, listed = found.offers
    assert (spot.spot, listed.spot) == (True, False)
    assert spot.goodput < listed.goodput < 1
    assert spot.hours > listed.hours
    assert spot.cost < listed.cost
    assert found.left_out["unpriced"] == ["p none"]


def test_what_is_not_simulated_is_not_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [instance(f"at {price}", list_usd_per_hour=float(price)) for price in (20, 22, 60)]
    whole = [offer.instance.instance for offer in market(*several).offers]
    monkeypatch.setattr(module, "MOST", 2)
    found = market(*several)
    assert [offer.instance.instance for offer in found.offers] == whole[:2]
    assert found.left_out["dearer"] == ["p at 60"]


def test_each_offer_is_checked_with_the_global_batch() -> None:
    eight, four = instance("eight"), instance("four", gpus=4)
    found = market(eight, four, global_batch=16, micro_batches=(4,))
    assert [offer.instance.instance for offer in found.offers] == ["four"]
    assert found.left_out["uneven"] == ["p eight"]
    assert found.offers[0].plan.option.workload.micro_batch == 4


@pytest.mark.parametrize(
    ("changes", "within", "said"),
    [
        (
            {"lora_rank": None, "strategies": ("ddp",)},
            None,
            "nothing fits, .*lacks",
        ),
        ({"tokens": 1e13}, 1.0, r"2 kinds .* late: the soonest, 8 × p one, would compute for"),
        ({"tokens": 1.08e9}, 1.0, r"2 kinds .* late: the soonest, 8 × p one, takes \S+ hours"),
        ({"global_batch": 16, "micro_batches": (4,)}, None, "global_batch = 16: is no multiple"),
    ],
)
def test_why_there_is_no_offer(changes: dict[str, Any], within: float | None, said: str) -> None:
    instances = (instance("one"), instance("other"))
    found = market(*instances, within=within, **changes)
    assert not found.offers
    request = Request(
        model="llama-3-8b",
        hardware=replace(instances[0].cluster(1), ranks_per_node=1),
        sequence_lengths=(2048,),
        **{"lora_rank": 8, "strategies": ("ddp", "fsdp2"), **changes},
    )
    assert re.search(said, refused(found, request, instances)), refused(found, request, instances)

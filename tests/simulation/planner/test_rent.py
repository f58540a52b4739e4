"""Offers of instances: cheapest first, in time, and none that is cheaper left out."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.goodput import goodput
from simulation.planner import rent as module
from simulation.planner.rent import ALL, Instance, Market, read, refused, rent
from simulation.planner.request import Request


def instance(name: str, **changes: Any) -> Instance:
    fields = {"provider": "p", "gpu": "a100-80gb", "gpus": 8, "nic_gbit_s": 400, "nodes": 8}
    return Instance(instance=name, **(fields | {"list_usd_per_hour": 20.0} | changes))


def asked(of: Instance, **changes: Any) -> Request:
    usual = {"model": "llama-3-8b", "lora_rank": 8, "sequence_lengths": (2048,), "tokens": 1e9}
    usual |= {"strategies": ("ddp", "fsdp2"), "recomputed": (0.0, 1.0)}
    return Request(hardware=replace(of.cluster(1), ranks_per_node=1), **(usual | changes))


def market_of(*instances: Instance, within: float | None = None, **changes: Any) -> Market:
    return rent(asked(instances[0], **changes), instances, within)


def test_cheapest_first_and_costs_follow_from_prices() -> None:
    market = market_of(instance("dear", list_usd_per_hour=30), instance("cheap"))
    assert [offer.instance.instance for offer in market.offers] == ["cheap", "dear"]
    cheap, dear = market.offers
    assert dear.cost == pytest.approx(1.5 * cheap.cost)
    low, high = cheap.cost_range
    assert low < cheap.cost < high
    assert cheap.cost == pytest.approx(20 * cheap.hours)


def test_pods_have_several_sizes_and_each_offer_a_chance_to_be_in_time() -> None:
    kinds = [*instance("pod", gpus=1, list_usd_per_hour=3.5, pods="2 4 8").sized()]
    assert {one.gpus: one.list_usd_per_hour for one in kinds} == {1: 3.5, 2: 7, 4: 14, 8: 28}
    first = market_of(*kinds).offers[0]
    low, high = (cost / first.cost for cost in first.cost_range)
    chances = [first.chance(times * first.hours) for times in (low, 1, high)]
    assert chances == pytest.approx([0.05, 0.5, 0.95])


def test_a_deadline_takes_more_nodes_or_leaves_out() -> None:
    alone, several = instance("alone", nic_gbit_s=None), instance("several")
    (first, *_) = market_of(alone, several).offers
    market = market_of(alone, several, within=first.hours / 3)
    assert [offer.instance.instance for offer in market.offers] == ["several"]
    assert market.offers[0].hardware.nodes == 4
    assert market.left_out["late"] == ["p alone"]


def test_spot_is_cheaper_and_slower() -> None:
    market = market_of(
        instance("both", spot_usd_per_hour=6.0), instance("none", list_usd_per_hour=None)
    )
    spot, listed = market.offers
    assert (spot.spot, listed.spot) == (True, False)
    assert spot.goodput < listed.goodput < 1
    assert spot.hours > listed.hours
    assert spot.cost < listed.cost
    assert market.left_out["unpriced"] == ["p none"]


def test_what_is_not_simulated_is_not_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [instance(f"at {price}", list_usd_per_hour=float(price)) for price in (20, 22, 60)]
    whole = [offer.instance.instance for offer in market_of(*several).offers]
    monkeypatch.setattr(module, "MOST", 2)
    market = market_of(*several)
    assert [offer.instance.instance for offer in market.offers] == whole[:2]
    assert market.left_out["dearer"] == ["p at 60"]


def test_each_offer_is_checked_with_the_global_batch() -> None:
    eight, four = instance("eight"), instance("four", gpus=4)
    market = market_of(eight, four, global_batch=16, micro_batches=(4,))
    assert [offer.instance.instance for offer in market.offers] == ["four"]
    assert market.left_out["uneven"] == ["p eight"]
    assert market.offers[0].plan.option.workload.micro_batch == 4


@pytest.mark.parametrize(
    ("changes", "within", "reason"),
    [
        ({"lora_rank": None, "strategies": ("ddp",)}, None, "nothing fits, .*lacks"),
        ({"tokens": 1e13}, 1.0, r"2 kinds .* late: the soonest, 8 × p one, would compute for"),
        ({"tokens": 1.2e9}, 1.0, r"2 kinds .* late: the soonest, 8 × p one, takes \S+ hours"),
        ({"global_batch": 16, "micro_batches": (4,)}, None, "global_batch = 16: is no multiple"),
    ],
)
def test_why_there_is_no_offer(changes: dict[str, Any], within: float | None, reason: str) -> None:
    instances = (instance("one"), instance("other"))
    market = market_of(*instances, within=within, **changes)
    assert not market.offers
    text = refused(market, asked(instances[0], **changes), instances)
    assert re.search(reason, text), text


SECONDS = st.floats(0, 1e4)


@given(SECONDS, st.floats(1, 1e9), SECONDS)
def test_it_is_a_share_that_failures_lower(save: float, mean: float, restart: float) -> None:
    share = goodput(save, mean, restart)
    assert 0 <= share <= 1
    assert goodput(save, 2 * mean, restart) >= share - 1e-9
    assert goodput(save, mean, restart + 1) <= share


def test_youngs_interval_and_its_loss() -> None:
    # A save of 60 s, a failure a day: √(2 · 60 · 86,400) = 3,220 s between saves, 3.7 % lost.
    assert goodput(60, 86_400, 0) == pytest.approx(1 - math.sqrt(2 * 60 / 86_400), abs=1e-3)
    assert goodput(3600, 60, 300) == pytest.approx(0)
    assert goodput(0, 1, 709) == 0


YAML = Path(__file__).with_name("nodes.yaml").read_text(encoding="utf-8")


def test_each_row_has_a_source_and_a_date_and_what_it_does_not_say_is_not_planned() -> None:
    rows = read(ALL)
    assert len({(row.provider, row.instance) for row in rows}) == len(rows)
    for row in rows:
        assert row.source.startswith("https://")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.as_of)
        assert row.cluster(1).world_size == row.gpus
        assert row.list_usd_per_hour or row.spot_usd_per_hour
    (lambda_h100,) = (row for row in rows if row.name == "lambda 8x H100 SXM")
    assert lambda_h100.most_nodes == 1
    (p5,) = (row for row in rows if row.instance == "p5.48xlarge")
    assert p5.cluster(2).inter_bytes_per_s == pytest.approx(0.8 * 3.2e12 / 8)


def test_nodes_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(YAML)
    (node,) = read(file)
    assert (node.most_nodes, node.cluster(4).world_size) == (4, 32)
    with pytest.raises(ValueError, match="instances = 'nosuch': allowed are all, and a CSV"):
        read("nosuch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML.replace("a40", "a41"), "ours.yaml:1: .*gpu = 'a41': allowed are a40"),
        (YAML.replace("gpus: 8", "gpus: 0"), "ours.yaml:1: .*gpus: Input should be greater"),
        (YAML + "  colour: red\n", "colour: Extra inputs are not permitted"),
        ("provider: ours\n", "must be a list of instances"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(file)

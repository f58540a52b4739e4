"""Offers on a screen of 80 columns, on which no number is cut; a GPU of one's own."""

from dataclasses import replace

import pytest
from rich.console import RenderableType

from simulation import hardware
from simulation.hardware import described
from simulation.planner import rent
from simulation.planner.plan import plan
from simulation.planner.rent import Instance
from simulation.planner.request import Request
from tests.experiments.command_line import rendered
from tests.simulation.planner.made_up import rented


def screen(shown: RenderableType) -> str:
    lines = rendered(shown, 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    return "\n".join(lines)


def test_offers_with_their_chance_to_be_in_time() -> None:
    pods = Instance(
        provider="a-provider",
        instance="H100 SXM",
        gpu="h100-sxm",
        gpus=1,
        host_memory_gib=125,
        list_usd_per_hour=3.49,
        as_of="2026-10-07",
        pods="2 4 8",
    )
    kinds = [*pods.sized()]
    prices = {one.gpus: one.list_usd_per_hour for one in kinds}
    assert prices == {1: 3.49, 2: 6.98, 4: 13.96, 8: 27.92}
    request = Request(
        model="llama-3-8b",
        hardware=replace(kinds[0].cluster(1), ranks_per_node=1),
        lora_rank=8,
        strategies=("ddp", "fsdp2"),
    )
    market = rent.rent(request, kinds, None)
    costs = [offer.cost for offer in market.offers]
    assert costs == sorted(costs)
    first = market.offers[0]
    low, high = first.cost_range
    assert first.chance(first.hours) == pytest.approx(0.5)
    assert first.chance(first.hours * high / first.cost) == pytest.approx(0.95)
    assert first.chance(first.hours * low / first.cost) == pytest.approx(0.05)
    text = screen(rent.table(market, request, 24.0))
    assert f"{first.cost:,.0f}" in text
    assert "llama-3-8b · LoRA 8 on bf16 · 8192 tokens a sequence · a micro-batch per rank" in text
    assert "2026-10-07" in text


def test_a_gpu_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CARDS", dict(hardware.CARDS))
    name = described("mine:tflops=312,gb=80,gb_s=2039,nvlink_gb_s=300,like=a100-80gb")
    own, known = (
        plan(Request(model="llama-3-8b", hardware=rented(gpu, gbit_s=100), strategies=("fsdp2",)))
        for gpu in (name, "a100-80gb")
    )
    assert own.option.tokens_per_s == pytest.approx(known.option.tokens_per_s, rel=0.05)
    assert described("H100") == "h100-sxm"
    own_ones = ("mine:tflops=312", "mine:tflops=x,gb=80,gb_s=1", "mine:tflops=1,gb=1,gb_s=1,a=2")
    for wrong in (*own_ones, "h100 nvl"):
        with pytest.raises(ValueError, match="gpu = .*NAME:tflops=71,gb=24,gb_s=936"):
            described(wrong)

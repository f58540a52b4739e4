"""The cost model: convex in what is kept, its choice the best of all, its rates those observed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.fuyou import cost
from baselines.fuyou.blocks import Profile
from baselines.fuyou.cost import Item, Rates, Work
from baselines.fuyou.train import Observed
from tests.baselines.fuyou.training import settings

_POSITIVE = st.floats(1e-3, 1e3)
_ITEMS = st.lists(st.builds(Item, nbytes=_POSITIVE, flops=st.floats(0, 1e3)), max_size=12)


@st.composite
def works(draw: st.DrawFn) -> Work:
    items = tuple(draw(_ITEMS))
    most = sum(item.flops for item in items)
    numbers = [draw(st.floats(0, 1e3)) for _ in range(6)]
    return Work(most + numbers[0], most, *numbers[1:], items, draw(st.booleans()))


RATES = st.builds(
    Rates,
    flops=_POSITIVE,
    link=_POSITIVE,
    read=_POSITIVE,
    write=_POSITIVE,
    adam=st.floats(0, 1e3),
    dram=st.floats(0, 1e4),
    duplex=st.booleans(),
)


@given(works(), RATES)
def test_the_step_is_convex_in_what_is_kept(work: Work, rates: Rates) -> None:
    points = cost.curve(work, rates)
    for (a, left), (b, middle), (c, right) in zip(points, points[1:], points[2:], strict=False):
        straight = left + (right - left) * (b - a) / (c - a)
        assert middle <= straight * (1 + 1e-9)


@given(works(), RATES, st.booleans())
def test_what_is_chosen_is_the_best_of_all_amounts(work: Work, rates: Rates, keeps: bool) -> None:
    rates = replace(rates, keeps_parameters=keeps)
    times = [step for _, step in cost.curve(work, rates)]
    chosen = cost.chosen(work, rates)
    assert times[chosen] == pytest.approx(min(times))
    assert all(step > times[chosen] for step in times[:chosen])


def test_the_second_matrix_of_the_mlp_spares_four_times_the_operations_for_a_byte() -> None:
    """In a layer of width h, for a token: qkv, projection, and the MLP's two matrices."""
    h = 1024
    outputs = {"qkv": (3, 1), "projection": (1, 1), "first": (4, 1), "second": (1, 4)}
    items = [Item(2 * out * h, 2 * out * wide * h * h) for out, wide in outputs.values()]
    assert [items[3].benefit / item.benefit for item in items] == [4, 4, 4, 1]
    assert cost.by_benefit(items)[0] == 3


def test_the_formula_by_hand() -> None:
    """13 parameters in bf16: 26 bytes computed with, 156 of state, and 10 + 20 of activations."""
    work = Work(
        flops=100,
        recomputed=100,
        parameters=26,
        gradients=26,
        state_read=156,
        state_written=182,
        between=10,
        items=(Item(20, 50),),
    )
    rates = Rates(flops=10, link=4, read=8, write=2, adam=50, dram=15)
    (none, recomputing), (some, swapping) = cost.curve(work, rates)
    assert (none, some) == (0, 20)
    # 10 s of forward; 182 / 8 + 182 / 2 of SSDs in backward.
    assert recomputing == pytest.approx(10 + 22.75 + 91)
    # 26 / 8 + 15 / 2 are more than forward's 10; and 15 bytes more are read in backward.
    assert swapping == pytest.approx(10.75 + 22.75 + 91 + 15 / 8)
    assert cost.chosen(work, rates) == 0
    # Without a wait for what is written SSDs are the limit of the whole: 208 / 8 + 182 / 2.
    delayed = cost.curve(replace(work, delayed=True), rates)
    assert [step for _, step in delayed] == pytest.approx([26 + 91, 26 + 91 + 15 / 8 + 15 / 2])


def _rates(read: tuple[int, float], **chosen: Any) -> Rates:
    """Rates observed in a step, before which the disk has moved something."""
    moved = {"read": (50, 0.1), "write": (90, 0.1)}
    copies, adam = SimpleNamespace(nbytes=0, seconds=0.0), SimpleNamespace(seconds=1.0)
    observed = Observed(SimpleNamespace(moved=moved.__getitem__), copies, adam)  # type: ignore[arg-type]
    moved["read"] = 50 + read[0], 0.1 + read[1]
    observed.computed(2.0)
    return observed.rates(Profile(10.0, 0, {}), settings(**chosen), room=7, buffers=2)


def test_rates_are_those_of_the_step_that_is_observed() -> None:
    rates = _rates((60, 2.0))
    assert rates.read == pytest.approx(30)
    assert rates.write > 1e9
    assert rates.flops == 4 * 10 / 2
    assert not rates.duplex


def test_a_disk_with_a_limit_is_no_faster_than_that() -> None:
    """Its control group lets the first megabytes pass faster."""
    rates = _rates((60, 2.0), ssd_limit=20)
    assert (rates.read, rates.write) == (20, 20)
    assert rates.duplex

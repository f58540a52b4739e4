"""Whether FCDP helps: the closed forms by hand, and each reason why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.preflight.advice import Workload, advise
from tests.experiments.preflight.made_up import preflight

#: 10 layers of 1e8 parameters: 0.2 GB each.
MODEL = Workload(parameters=1e9, layers=10, tokens=1024)


def test_the_closed_form_by_hand() -> None:
    advice = advise(preflight(), MODEL, "full")
    # Half of 0.2 GB crosses at 1 GB/s, 7/8 of it goes round inside at 10 GB/s; a rank copies 1/8
    # of the half from host memory.
    across, inside, copy = 0.1, 0.0175, 0.00125
    assert advice.gather_across_s == pytest.approx(across + inside)
    assert advice.gather_from_host_s == pytest.approx(copy + inside)
    assert advice.compute_s == pytest.approx(6 * 1e9 * 1024 / 100e12)
    assert advice.zero3_s == pytest.approx(10 * 3 * (across + inside))
    assert advice.fcdp_s == pytest.approx(10 * (2 * (across + inside) + copy + inside))
    assert advice.helps
    lora = advise(preflight(), MODEL, "lora")
    assert lora.compute_s == pytest.approx(4 * 1e9 * 1024 / 100e12)
    assert lora.zero3_s == pytest.approx(10 * 2 * (across + inside))
    assert lora.fcdp_s == pytest.approx(10 * 2 * (copy + inside))
    assert "compute hides neither" in lora.why


def test_micro_batches_cost_fcdp_no_crossing() -> None:
    once = advise(preflight(inside=1e15, copy=1e15), MODEL, "full")
    four = Workload(MODEL.parameters, MODEL.layers, MODEL.tokens, accumulation=4)
    often = advise(preflight(inside=1e15, copy=1e15), four, "full")
    assert often.fcdp_s == pytest.approx(once.fcdp_s, rel=1e-3)
    assert often.zero3_s == pytest.approx(4 * once.zero3_s)


@pytest.mark.parametrize(
    ("cluster", "why"),
    [
        ({"nodes": 1}, "on one node nothing crosses nodes"),
        ({"free": 10**8}, "its cache needs 1.0 GB of host memory a node, and 0.1 GB are free"),
        ({"flops": 1e12}, "takes less time than the compute"),
        ({"copy": 1e8}, "the copy from host memory takes about as long as crossing nodes"),
        ({"inside": 0.05e9}, "the gather inside the node takes about as long"),
    ],
)
def test_why_it_does_not_help(cluster: dict[str, Any], why: str) -> None:
    advice = advise(preflight(**cluster), MODEL, "lora")
    assert not advice.helps
    assert why in advice.why


@pytest.mark.parametrize("value", [0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["parameters", "layers", "tokens", "accumulation"])
def test_an_impossible_workload_is_named(field: str, value: float) -> None:
    settings = {"parameters": 1e9, "layers": 10, "tokens": 1024, field: value}
    with pytest.raises(ValueError, match=f"{field} = {value}: allowed are numbers from 1"):
        Workload(**settings)  # type: ignore[arg-type]

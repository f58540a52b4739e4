"""Quantities as people write them, and the error for each mistake."""

import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation import quantities as q
from tests.experiments.golden import tables


def test_numbers_with_units() -> None:
    written = tables(__file__)
    for name, parse in {
        "bandwidths": partial(q.bits_per_s, "--inter-node"),
        "counts": partial(q.count, "--tokens"),
        "links": q.link,
    }.items():
        assert {text: parse(text) for text in written[name]} == written[name]
    assert q.lora_rank("--peft", "lora:16") == 16


@pytest.mark.parametrize("parse", [q.bits_per_s, q.size_bytes, q.count, q.whole, q.checkpointing])
@pytest.mark.parametrize("text", ["", "fast", "-1", "-5Gbps", "-5GB", "nan", "inf", "1e999", "1,5"])
def test_what_is_none_names_option_value_and_what_is_allowed(
    parse: Callable[[str, str], Any], text: str
) -> None:
    with pytest.raises(ValueError, match=r"^--option = '.*': allowed: ") as caught:
        parse("--option", text)
    assert repr(text) in str(caught.value)


def test_a_list_has_each_once_and_no_gaps() -> None:
    assert q.each("--sequence-length", "512,1024,512", q.whole) == (512, 1024)
    assert q.each("--checkpointing", "0,0.5", q.checkpointing) == (0, 0.5)
    policies = "host,budget(device=1 GiB, host=4 GiB)"
    assert q.each("--policies", policies, q.name) == ("host", "budget(device=1 GiB, host=4 GiB)")
    with pytest.raises(ValueError, match="--strategies = '': allowed: names"):
        q.each("--strategies", "fcdp,,fsdp2", q.name)


@given(st.floats(min_value=1e-3, max_value=1e6), st.sampled_from(["Gbps", " Gbit/s", "gbps"]))
def test_a_number_is_taken_as_it_is(number: float, unit: str) -> None:
    assert q.bits_per_s("--inter-node", f"{number!r}{unit}") == float(Decimal(repr(number)) * 10**9)


@given(st.none() | st.integers(1, 10**15))
def test_every_link_can_be_written_and_read(bits: int | None) -> None:
    assert q.link(q.format_link(bits)) == bits
    assert q.format_link(math.nan) == "unshaped"

"""A size is read and written alike wherever there is one."""

from __future__ import annotations

import pytest

import fcdp
from baselines import sizes
from fcdp.cache import named
from simulation import quantities

TEXTS = {
    "512GB": 512e9,
    "512 GiB": 512 * 2**30,
    "1 MiB": 2**20,
    "1.5 kB": 1500,
    "1TB": 1e12,
    "100 B": 100,
    "2giB": 2**31,
}


@pytest.mark.parametrize(("text", "count"), TEXTS.items())
def test_every_place_reads_the_same(text: str, count: float) -> None:
    assert sizes.parse(text) == count
    assert quantities.size_bytes("--host-memory", text) == count
    assert named.parse(f"budget(host={text})") == fcdp.Budget(host=int(count))


@pytest.mark.parametrize("text", ["512", "GB", "-1 GB", "1 Gbit", "one GB", "infGB", ""])
def test_what_is_no_size_is_told_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: a number above 0 and a unit, such as 512GB"):
        sizes.parse(text)
    with pytest.raises(ValueError, match=f"--host-memory = '{text}': allowed: a number above 0"):
        quantities.size_bytes("--host-memory", text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1.26e9, "1.26 GB"), (512e9, "512 GB"), (25.3e9, "25.3 GB")],
)
def test_sizes_are_written_in_one_way(count: float, text: str) -> None:
    assert sizes.written(count) == text


@pytest.mark.parametrize(
    ("bits", "text"), [(99.5e9, "99.5 Gbit/s"), (40e6, "40 Mbit/s"), (1.234e12, "1,234 Gbit/s")]
)
def test_rates_are_written_in_one_way(bits: float, text: str) -> None:
    assert quantities.format_rate(bits) == text

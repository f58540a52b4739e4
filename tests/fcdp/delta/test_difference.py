"""A difference turns one version of a shard to the other, bit for bit, in few bytes.

A message leads from one version to the next, or is refused.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcdp.delta import message
from fcdp.delta.difference import CHUNK, apply, encode
from tests.fcdp.delta import arrives

LENGTHS = [0, 1, 7, 127, 128, 129, 1000, CHUNK - 1, CHUNK, CHUNK + 3]


def _words(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)


def _updated(count: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.randn(count) * 0.05
    return _words((weights + scale * torch.randn(count)).bfloat16()), _words(weights.bfloat16())


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1.0])
def test_updates_of_every_size_arrive(scale: float) -> None:
    for count in LENGTHS:
        arrives(*_updated(count, scale))


ADVERSARIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "signs": lambda t: -t,
    "zeros of both signs": lambda t: torch.zeros_like(t) * t.sign(),
    "infinities": lambda t: t / 0,
    "denormals": lambda t: t * 1e-39,
    "every one": lambda t: t * 1.5,
    "shuffled": lambda t: t[torch.randperm(t.numel())],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_adversarial_updates_arrive(adversary: str, dtype: torch.dtype) -> None:
    base = torch.randn(5000).to(dtype)
    new = ADVERSARIES[adversary](base.clone())
    taken = arrives(_words(new), _words(base))
    assert taken <= 1.01 * 2 * base.numel()


@pytest.mark.parametrize(
    ("scale", "most"), [(0.0, 0.002), (7e-7, 0.6), (7e-6, 1.6), (2e-5, 2.4), (7e-4, 7)]
)
def test_small_updates_take_few_bits(scale: float, most: float) -> None:
    count = CHUNK
    assert 8 * arrives(*_updated(count, scale)) <= most * count


@given(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 2**16))
def test_damage_is_detected_or_makes_other_words(place: int, value: int, cut: int) -> None:
    """Nothing but ``ValueError`` comes of bytes that nobody sent: no crash, no other error."""
    torch.manual_seed(0)
    new, base = _updated(3000, 1e-4)
    encoded = encode(new, base)
    encoded[place % encoded.numel()] = value
    out = base.clone()
    arrived = encoded[: max(1, encoded.numel() - cut % 3 * 100)]
    with contextlib.suppress(ValueError):
        assert apply(arrived, out) <= arrived.numel()


DTYPES = sorted(message.DTYPES, key=str)


def _versions(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.randn(count, dtype=torch.float64)
    return (weights * (1 + 1e-4 * torch.randn(count))).to(dtype), weights.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 129, 5001])
def test_shards_of_each_dtype_arrive(count: int, dtype: torch.dtype) -> None:
    new, base = _versions(count, dtype)
    for version, before in ((7, base), (message.ALONE, None)):
        written = message.write(new, before, version)
        assert written.numel() <= message.most_bytes(new) <= new.nbytes + 40
        row = base.clone()
        assert message.read(torch.cat([written, written.new_full((3,), 9)]), row, version)
        assert torch.equal(row.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_and_another_version_are_detected(dtype: torch.dtype) -> None:
    new, base = _versions(1000, dtype)
    written = message.write(new, base, 7)
    with pytest.raises(ValueError, match="from version 7 of a shard, of which 6 is here"):
        message.read(written, base.clone(), 6)
    if dtype.itemsize == 2:  # wider ones have no small difference from the base here
        with pytest.raises(ValueError, match="damaged|another checksum"):
            message.read(written, new.clone(), 7)  # not the base
    for length in (0, 8, 15, 16, 20):
        with pytest.raises(ValueError, match="cut|damaged"):
            message.read(written[:length], base.clone(), 7)
    with pytest.raises(ValueError, match="cut"):
        message.read(message.whole(new)[:-1], base.clone(), 7)
    for place in (17, 40, written.numel() - 3):
        damaged = written.clone()
        damaged[place] ^= 64
        row = base.clone()
        try:
            message.read(damaged, row, 7)
        except ValueError:
            continue
        assert torch.equal(row, new), place  # a count that this form does not have


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_whole_shard_is_never_taken_for_a_difference(version: int) -> None:
    new, base = _versions(9, torch.bfloat16)
    row = base.clone()
    encoded = message.write(new, base, version)
    assert not message.is_whole(encoded)
    with pytest.raises(ValueError, match=f"from version {version} of a shard"):
        message.read(encoded, row, message.ALONE)
    assert message.is_whole(message.whole(new))
    assert not message.read(message.whole(new), row, version)
    assert torch.equal(row, new)


def test_the_higher_halves_of_four_bytes_are_compared_with_each_other() -> None:
    """With anything else the difference would be as long as what it stands for."""
    base = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    new = base * 1.001
    written = message.write(new, base, 1)
    assert written.numel() < 0.7 * new.nbytes
    message.read(written, base, 1)
    assert torch.equal(base, new)

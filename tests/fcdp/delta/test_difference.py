"""A difference turns one version of a shard to the other, bit for bit, in few bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcdp.delta.difference import CHUNK, apply, encode
from tests.fcdp.delta.arriving import arrives

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
def test_damage_is_told_or_makes_other_words(place: int, value: int, cut: int) -> None:
    """Nothing but ``ValueError`` comes of bytes that nobody sent: no crash, no other error."""
    torch.manual_seed(0)
    new, base = _updated(3000, 1e-4)
    encoded = encode(new, base)
    encoded[place % encoded.numel()] = value
    out = base.clone()
    arrived = encoded[: max(1, encoded.numel() - cut % 3 * 100)]
    with contextlib.suppress(ValueError):
        assert apply(arrived, out) <= arrived.numel()

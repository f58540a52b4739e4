"""Words arrive by their exponents, in few bits where those are near each other."""

from __future__ import annotations

import pytest
import torch

from fcdp.delta import exponents
from fcdp.delta.difference import CHUNK, apply, capacity, encode

#: Words: about a block, a granule, a chunk.
COUNTS = (1, 2, 127, 128, 129, 5000, CHUNK, CHUNK + 3)


def gradients(count: int, scale: float = 1e-4) -> torch.Tensor:
    scales = torch.exp(torch.randn(-(-count // 500))).repeat_interleave(500)[:count]
    return (torch.randn(count) * scales * scale).bfloat16().view(torch.int16)


def arrives(words: torch.Tensor) -> int:
    encoded = encode(words, None)
    assert encoded.numel() <= capacity(words.numel())
    out = torch.full_like(words, -1)
    assert apply(torch.cat([encoded, encoded.new_full((5,), 255)]), out) == encoded.numel()
    assert torch.equal(out, words)
    return encoded.numel()


@pytest.mark.parametrize("count", [0, *COUNTS])
def test_words_arrive(count: int) -> None:
    for words in (
        gradients(count),
        torch.zeros(count, dtype=torch.int16),
        torch.randint(-(2**15), 2**15, (count,)).to(torch.int16),
        (torch.arange(count) * 129 - 2**15).to(torch.int16),
    ):
        arrives(words)


def test_every_word_arrives_beside_every_mean() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for mean in (0, 1, 126, 254, 255):
        blocks = torch.full((every.numel() // 2, 128), mean << 7, dtype=torch.int32)
        words = blocks.to(torch.int16)
        words[:, 7], words[:, 127] = every[::2], every[1::2]
        out = torch.empty(words.numel(), dtype=torch.int16)
        counts, parts = exponents.write(words.view(-1))
        assert exponents.read(parts, counts, out)
        assert torch.equal(out, words.view(-1))


def test_gradients_take_about_eleven_bits_of_sixteen() -> None:
    words = gradients(4 * CHUNK)
    assert 10 < 8 * arrives(words) / words.numel() < 11.2


def test_what_each_level_holds() -> None:
    """Distances from the mean: two bits to ±1, two more to −3 and 2, two more to −5 and 3."""
    near = torch.full((1024,), 100 << 7, dtype=torch.int16)
    for distance, counts in (
        *((1, [0, 0, 0]), (-1, [0, 0, 0]), (2, [1, 0, 0]), (-2, [1, 0, 0]), (-3, [1, 0, 0])),
        *((3, [1, 1, 0]), (-4, [1, 1, 0]), (-5, [1, 1, 0]), (4, [1, 1, 1]), (-6, [1, 1, 1])),
    ):
        words = near.clone()
        words[300] = (100 + distance) << 7
        found, parts = exponents.write(words)
        assert found == counts, distance
        assert [part.numel() for part in parts] == exponents.sizes(1024, found)


def test_sizes_are_the_parts() -> None:
    assert [exponents.sizes(count, [0, 0, 0])[-2] for count in (255, 256, 257)] == [2, 2, 3]
    for count in COUNTS:
        counts, parts = exponents.write(gradients(count))
        assert [part.numel() for part in parts] == exponents.sizes(count, counts)


def test_counts_that_do_not_fit_are_refused() -> None:
    words = gradients(1000)
    encoded = encode(words, None)
    assert encoded[:4].view(torch.int32).item() == 6  # as files have it
    for place in (4, 8, 12):  # of the table's row
        for change in (1, -1, -(2**31)):
            damaged = encoded.clone()
            damaged[place : place + 4].view(torch.int32).add_(change)
            with pytest.raises(ValueError, match="damaged"):
                apply(torch.cat([damaged, damaged.new_zeros(9000)]), words.clone())


def test_where_nothing_is_to_be_gained_words_go_as_they_are() -> None:
    words = torch.randint(-(2**15), 2**15, (2 * CHUNK,)).to(torch.int16)
    assert arrives(words) == words.nbytes + 2 * 16


@pytest.mark.parametrize("coding", ["packed", "entropy"])
def test_differences_that_are_as_long_as_words_are_told_by_exponents(coding: str) -> None:
    words = gradients(CHUNK)
    base = torch.randint(-(2**15), 2**15, (CHUNK,)).to(torch.int16)
    encoded = encode(words, base, coding)  # type: ignore[arg-type]
    assert (encoded.numel() < 0.7 * words.nbytes) == (coding == "entropy")
    apply(encoded, base)
    assert torch.equal(base, words)

"""Words arrive by their exponents, in few bits where those are near each other."""

import pytest
import torch

from fcdp.delta import exponents
from fcdp.delta.compiled import extra
from fcdp.delta.difference import CHUNK, apply, encode
from fcdp.delta.huffman import ZSTD
from tests.fcdp.delta import arrives

zstd = extra(ZSTD)
#: Words: about a block, a granule, a chunk.
COUNTS = (1, 2, 255, 256, 257, 5000, CHUNK, CHUNK + 3)


def gradients(count: int, scale: float = 1e-4) -> torch.Tensor:
    scales = torch.exp(torch.randn(-(-count // 500))).repeat_interleave(500)[:count]
    return (torch.randn(count) * scales * scale).bfloat16().view(torch.int16)


@pytest.mark.parametrize("count", [0, *COUNTS])
def test_words_arrive(count: int) -> None:
    for words in (
        gradients(count),
        torch.zeros(count, dtype=torch.int16),
        torch.randint(-(2**15), 2**15, (count,)).to(torch.int16),
        (torch.arange(count) * 129 - 2**15).to(torch.int16),
    ):
        arrives(words, None)


def test_every_word_arrives_beside_every_mean() -> None:
    all_words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for mean in (0, 1, 126, 254, 255):
        words = torch.full((2**15 // 64, 256), mean << 7, dtype=torch.int32).to(torch.int16)
        words[:, -128:] = all_words.view(-1, 128)  # behind those that the mean is of
        out = torch.empty(words.numel(), dtype=torch.int16)
        assert exponents.read(*exponents.write(words.view(-1)), out)
        assert torch.equal(out, words.view(-1))


def test_encoded_bytes_stay_readable() -> None:
    """Later versions read what this one has written: two blocks, part by part."""
    words = gradients(300)
    words[256:] = 0x3F80
    encoded, rest = exponents.write(words)
    distances, means = torch.tensor([*zstd.decompress(bytes(encoded.tolist()))]).split([300, 2])
    magnitudes = words.int() >> 7 & 0xFF
    assert torch.equal(distances + means.repeat_interleave(256)[:300] & 0xFF, magnitudes)
    assert means.tolist() == [int(magnitudes[at : at + 32].sum()) // 32 for at in (0, 256)]
    assert torch.equal(rest.int(), (words.int() & 0x7F) << 1 | (words < 0).int())


def test_gradients_take_about_eleven_bits_of_sixteen() -> None:
    words = gradients(CHUNK)
    assert 10 < 8 * arrives(words, None) / words.numel() < 11.2


def test_blocks_of_any_magnitude_take_as_few_bits() -> None:
    """An exponent is coded by its distance from those of its block."""
    words = torch.randn(2**16).bfloat16().view(torch.int16)
    alike, _ = exponents.write(words)
    encoded, _ = exponents.write(words + (torch.arange(2**16) // 256 % 50 << 7).to(torch.int16))
    assert encoded.numel() < 1.1 * alike.numel()


def test_bytes_of_too_few_or_too_many_exponents_are_refused() -> None:
    words = gradients(1000)
    encoded, rest = exponents.write(words)
    for count in (700, 999, 1001, 2000):  # 700 have three means, 999 and 1001 as many as 1000
        out = torch.empty(count, dtype=torch.int16)
        assert not exponents.read(encoded, torch.zeros(count, dtype=torch.uint8), out)
    assert exponents.read(encoded, rest, torch.empty_like(words))


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
    words = torch.randint(-(2**15), 2**15, (CHUNK + 3,)).to(torch.int16)
    assert arrives(words, None) == words.nbytes + 2 * 16


@pytest.mark.parametrize("coding", ["packed", "entropy"])
def test_differences_that_are_as_long_as_words_are_coded_by_exponents(coding: str) -> None:
    words = gradients(CHUNK)
    base = torch.randint(-(2**15), 2**15, (CHUNK,)).to(torch.int16)
    encoded = encode(words, base, coding)  # type: ignore[arg-type]
    assert (encoded.numel() < 0.7 * words.nbytes) == (coding == "entropy")
    apply(encoded, base)
    assert torch.equal(base, words)

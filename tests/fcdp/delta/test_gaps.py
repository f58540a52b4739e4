"""Numbers arrive, near their entropy, or are refused."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcdp.delta import difference, gaps, huffman
from fcdp.delta.compiled import extra
from fcdp.delta.difference import CHUNK, Coding, apply, encode
from fcdp.delta.huffman import ZSTD
from tests.fcdp.delta import arrives

zstd = extra(ZSTD)
CODINGS: tuple[Coding, ...] = ("entropy", "ordered")


def _drawn(count: int, share: float) -> torch.Tensor:
    """±1 mostly, larger ones at times."""
    signs = torch.randint(2, (count,)) * 2 - 1
    sizes = torch.where(torch.rand(count) < 0.05, torch.randint(1, 300, (count,)), 1)
    return (signs * sizes * (torch.rand(count) < share)).to(torch.int16)


def _compressed(raw: list[int], end: int = zstd.ZstdCompressor.FLUSH_FRAME) -> torch.Tensor:
    coder = zstd.ZstdCompressor()
    return torch.tensor([*coder.compress(bytes(raw), end)], dtype=torch.uint8)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 1.0])
def test_numbers_arrive(share: float, coding: Coding) -> None:
    for count in (0, 1, 127, 5000, CHUNK + 3):
        base = torch.randn(count).bfloat16().view(torch.int16)
        numbers = _drawn(count, share)
        numbers[CHUNK - 1 : CHUNK] = 1  # which the sample does not show
        arrives(base + numbers, base, coding)


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(-(2**15), 2**15 - 1)), max_size=30),
    st.sampled_from(CODINGS),
)
def test_any_gaps_arrive(runs: list[tuple[int, int]], coding: Coding) -> None:
    numbers = [number for zeros, last in runs for number in (*[0] * zeros, last)]
    base = torch.arange(len(numbers), dtype=torch.int32).to(torch.int16)
    arrives(base + torch.tensor(numbers, dtype=torch.int16), base, coding)


def test_what_a_byte_holds_takes_one() -> None:
    numbers = torch.tensor([-129, -128, 127, 128], dtype=torch.int16)
    sizes, data = gaps.write(numbers, window=17)
    decoded = huffman.read(data, 100)
    assert decoded is not None
    assert decoded.numel() == sizes.tokens + sizes.others + 2 * 2  # two are words beside


@pytest.mark.parametrize("share", [0.008, 0.05, 0.12])
def test_they_take_hardly_more_than_their_entropy(share: float) -> None:
    count = 2 * CHUNK
    numbers = _drawn(count, share)
    _, counts = numbers.unique(return_counts=True)
    frequencies = counts / count
    entropy = float(-(frequencies * frequencies.log2()).sum())
    base = torch.zeros(count, dtype=torch.int16)
    bits = 8 * arrives(numbers, base, "entropy") / count
    assert bits <= 1.2 * entropy
    packed = 8 * encode(numbers, base).numel() / count
    assert bits < 0.7 * packed
    # Changes depend on the old word's magnitude: coded in its order they take less.
    small = (torch.rand(count) < 0.5).short()
    words = (small * 0x3000 + (1 - small) * 0x3C00).short()
    some = numbers * small
    ordered = arrives(words + some, words, "ordered")
    assert ordered < 0.97 * arrives(words + some, words, "entropy")


@pytest.mark.parametrize("coding", CODINGS)
def test_words_that_are_too_few_for_a_table_are_sent_as_they_are(coding: Coding) -> None:
    numbers = torch.full((8,), 100, dtype=torch.int16)
    assert arrives(numbers, torch.zeros_like(numbers), coding) == difference.capacity(8)


def test_runs_of_zeros_of_any_length_arrive() -> None:
    for zeros in (62, 63, 64, 65, 127, 128):
        for more in (0, 1, 63):
            numbers = torch.zeros(64 * zeros + more + 1, dtype=torch.int16)
            numbers[-1] = 1
            arrives(numbers, torch.zeros_like(numbers), "entropy")


def test_numbers_of_a_byte_take_hardly_more_than_it() -> None:
    numbers = torch.randint(-100, 100, (5000,)).short()
    assert arrives(numbers, torch.zeros_like(numbers), "entropy") < 1.3 * numbers.numel()


def test_files_of_publications_stay_readable() -> None:
    """Later versions read what this one has written: some numbers, byte by byte."""
    tokens = [3 << 2, 3, 1, 1 << 2 | 3, 2 << 2 | 2, 2, 63 << 2 | 3, 3, 7 << 2 | 1]
    others = [5, 0, *(300).to_bytes(2, "little")]
    numbers = torch.zeros(5000, dtype=torch.int16)
    at = torch.tensor([3, 3 + 65, 68 + 131, 200, 201 + 65 * 64 + 7])
    numbers[at] = torch.tensor([1, -1, 5, 300, -1], dtype=torch.int16)
    sizes, data = gaps.write(numbers, 17)
    assert sizes == (len(tokens), 2, data.numel())
    assert [*zstd.decompress(bytes(data.tolist()))] == [*tokens, *others]
    read = torch.zeros_like(numbers)
    assert gaps.read(sizes, _compressed([*tokens, *others]), read)
    assert torch.equal(read, numbers)
    words = torch.tensor([1.0, 0.5, 2.0, -0.5]).bfloat16().view(torch.int16)
    assert gaps.by_magnitude(words).tolist() == [1, 3, 0, 2]
    forms: dict[Coding, int] = {"entropy": 3, "ordered": 5}
    for coding, form in forms.items():
        encoded = encode(numbers, torch.zeros_like(numbers), coding)
        assert encoded[:4].view(torch.int32).item() == form


def test_bytes_are_read_unless_they_are_none_or_more_than_there_can_be() -> None:
    for raw, most in (([], 1), ([7], 1), ([7, 8, 9], 3), ([7, 8, 9], 2)):
        read = gaps.huffman.read(_compressed(raw), most)
        assert (read is not None and read.tolist() == raw) == (0 < len(raw) <= most)


def test_more_than_there_can_be_is_refused_before_it_is_unpacked() -> None:
    numbers = torch.zeros(5000, dtype=torch.int16)
    unpacked = mock.patch.object(gaps.huffman, "read", side_effect=AssertionError("unpacked"))
    for tokens, others in ((5001, 0), (0, 0), (-1, 0), (1, 2), (1, -1)):
        with unpacked:
            assert not gaps.read(gaps.Sizes(tokens, others, 9), numbers.view(torch.uint8), numbers)


def test_what_cannot_have_been_written_is_refused() -> None:
    numbers = _drawn(5000, 0.1)
    sizes, data = gaps.write(numbers, 17)

    def refused(sizes: gaps.Sizes, data: torch.Tensor, count: int = 5000) -> bool:
        return not gaps.read(sizes, data, torch.zeros(count, dtype=torch.int16))

    assert not refused(sizes, data)
    assert refused(sizes, data[:-1])
    assert refused(sizes, data, count=int(numbers.nonzero()[-1]))
    for tokens, others in ((-1, 0), (0, -1), (1, 1), (2**30, 0)):
        assert refused(sizes._replace(tokens=tokens, others=others), data)
    assert refused(sizes._replace(tokens=sizes.tokens + 1), data)
    assert refused(sizes._replace(others=sizes.others + 1), data)
    assert refused(sizes, torch.full((10,), 255, dtype=torch.uint8))
    assert refused(gaps.Sizes(0, 0, 2), _compressed([]))
    near, _ = gaps.write(numbers.clamp(-1, 1), 17)
    assert refused(near._replace(others=2), gaps.write(numbers.clamp(-1, 1), 17)[1])
    assert not refused(gaps.Sizes(1, 1, 0), _compressed([2, 0, 44, 1]))
    assert refused(gaps.Sizes(1, 1, 0), _compressed([2, 0, 44]))
    assert refused(gaps.Sizes(1, 1, 0), _compressed([2, 0, 44, 1], zstd.ZstdCompressor.FLUSH_BLOCK))
    assert refused(gaps.Sizes(1, 1, 0), _compressed([2]))
    assert refused(gaps.Sizes(1, 1, 0), _compressed([2, 0]))
    assert refused(gaps.Sizes(1, 1, 0), _compressed([2, 5, 44, 1]))
    assert refused(gaps.Sizes(2, 2, 0), _compressed([2, 0, 5, 6]))
    assert refused(gaps.Sizes(2, 1, 0), _compressed([2, 2, 5]))
    base = torch.zeros(5000, dtype=torch.int16)
    encoded = encode(numbers, base, "entropy")
    for place in range(4, encoded.numel(), 7):
        damaged = encoded.clone()
        damaged[place] ^= 64
        try:  # whatever is not refused here, the checksum of the version refuses
            apply(damaged, base.clone())
        except ValueError:
            continue

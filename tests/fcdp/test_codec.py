"""Codecs: what comes back is within half a scale, in as many bytes as the closed form says."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fcdp

Block = fcdp.BlockInt8 | fcdp.BlockInt4

blocks = st.integers(1, 20)
codecs = st.one_of(st.builds(fcdp.BlockInt8, blocks), st.builds(fcdp.BlockInt4, blocks))
# The largest magnitude of fp32 itself may round up to infinity.
finite = st.floats(-(2.0**126), 2.0**126, width=32)
small = st.floats(-1, 1, width=16)
values = st.one_of(st.lists(finite, max_size=70), st.lists(small, max_size=70))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
BOTH = [fcdp.BlockInt8(8), fcdp.BlockInt4(8)]


def coded(
    codec: fcdp.Codec, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    out = torch.empty_like(tensor, dtype=dtype)
    codec.decode(codec.encode(tensor), out)
    return out


def scales_of(codec: Block, tensor: torch.Tensor) -> torch.Tensor:
    """One for each element."""
    largest = [part.abs().max() for part in tensor.double().split(codec.block)]
    each = torch.stack(largest).repeat_interleave(codec.block)[: tensor.numel()]
    return each / codec.limit


@given(codecs, values, st.sampled_from([torch.float32, torch.float64]))
def test_an_error_is_at_most_half_the_scale(
    codec: Block, numbers: list[float], dtype: torch.dtype
) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)
    if not numbers:
        assert coded(codec, tensor).numel() == 0
        return
    scales = scales_of(codec, tensor)
    # Besides: the arithmetic's own rounding, and the smallest scale.
    rounding = 4 * torch.finfo(torch.float32).eps * tensor.abs().double()
    bound = scales.clamp_min(torch.finfo(torch.float32).tiny) / 2 + rounding
    assert ((coded(codec, tensor).double() - tensor).abs() <= bound * (1 + 1e-6)).all()


@given(codecs, st.integers(0, 200), dtypes)
def test_the_size_is_the_closed_form(codec: Block, numel: int, dtype: torch.dtype) -> None:
    encoded = codec.encode(torch.ones(numel, dtype=dtype))
    width = 8 if isinstance(codec, fcdp.BlockInt8) else 4
    size = math.ceil(numel * width / 8) + 4 * math.ceil(numel / codec.block)
    assert encoded.shape == (size,) == (codec.encoded_bytes(numel),)
    assert encoded.dtype == torch.uint8
    assert encoded.is_contiguous()


def test_int4_puts_the_first_of_two_values_into_the_lower_bits() -> None:
    encoded = fcdp.BlockInt4(4).encode(torch.tensor([7.0, -7.0, 1.0]))
    assert encoded[:4].view(torch.float32).item() == 1.0
    assert encoded[4:].tolist() == [0x97, 0x01]


def test_the_smallest_numbers_do_not_change_their_sign() -> None:
    # A quotient of theirs would be rounded so far that the code did not fit.
    tensor = torch.tensor([180.0, -180.0]) * torch.tensor(2.0**-149)
    for codec in BOTH:
        assert (coded(codec, tensor) * torch.tensor([1.0, -1.0]) >= 0).all()


@given(
    codecs,
    st.lists(finite, min_size=1, max_size=70),
    st.integers(0, 69),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    dtypes,
)
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(
    codec: Block, numbers: list[float], place: int, special: float, dtype: torch.dtype
) -> None:
    tensor = torch.tensor([number * 1e-34 for number in numbers], dtype=torch.float32).to(dtype)
    place %= tensor.numel()
    tensor[place] = special
    finite_after = coded(codec, tensor).isfinite()
    expected = torch.ones_like(finite_after)
    begin = place // codec.block * codec.block
    expected[begin : begin + codec.block] = False
    assert torch.equal(finite_after, expected)


def test_bad_settings_are_refused() -> None:
    for codec in (fcdp.BlockInt8, fcdp.BlockInt4):
        with pytest.raises(ValueError, match="block = 0: must be a whole number, 1 or more"):
            codec(0)
        with pytest.raises(ValueError, match="block = 64.0: must be a whole number"):
            codec(64.0)  # type: ignore[arg-type]


def test_settings_are_what_the_docs_say() -> None:
    assert (fcdp.BlockInt8().block, fcdp.BlockInt4().block) == (256, 64)
    assert (fcdp.BlockInt8.limit, fcdp.BlockInt4.limit) == (127, 7)
    assert [fcdp.Delta(when).when for when in ("pays", "always")] == ["pays", "always"]
    assert fcdp.Exact().when == "pays"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("codec", BOTH, ids=repr)
def test_on_a_gpu(codec: Block) -> None:
    tensor = torch.randn(1001)
    there = coded(codec, tensor.cuda())
    torch.testing.assert_close(there.cpu(), coded(codec, tensor), atol=1e-6, rtol=1e-6)

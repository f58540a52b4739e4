"""Codecs by name: what matrix files may say, and sizes against the library's codecs."""

import pytest

import fcdp
from baselines.encoding import encoded_bytes, gather, parse, reduction


def test_names_stand_for_codecs() -> None:
    """Gathers may tell differences, and reductions may be coded exactly."""
    for text, codec in {
        "none": None,
        "int8": fcdp.BlockInt8(),
        "int4": fcdp.BlockInt4(),
        "int4(128)": fcdp.BlockInt4(128),
    }.items():
        assert gather(text) == reduction(text) == parse(text) == codec
    assert gather("delta") == fcdp.Delta()
    assert reduction("exact") == fcdp.Exact()
    for when in ("always", "smallest"):
        assert gather(f"delta({when})") == fcdp.Delta(when)
    assert reduction("exact(always)") == fcdp.Exact("always")


@pytest.mark.parametrize("text", ["int2", "int8()", "int8(-1)", "int8(0)", "", "delta", "exact"])
def test_anything_else_is_refused(text: str) -> None:
    others = {"delta": (reduction, ", and exact"), "exact": (gather, ", and delta")}
    sized = lambda codec: encoded_bytes(codec, 1)  # noqa: E731
    own = [others[text]] if text in others else others.values()
    for read, more in ((parse, ""), (sized, ""), *own):
        with pytest.raises(ValueError, match=f"codec = .*: allowed are none, int8, int4.*{more}"):
            read(text)


@pytest.mark.parametrize("codec", ["int8", "int4", "int8(128)", "int4(7)"])
@pytest.mark.parametrize("numel", [1, 63, 64, 257, 10**6 + 1])
def test_bytes_are_the_librarys(codec: str, numel: int) -> None:
    encoder = parse(codec)
    assert encoded_bytes(codec, numel) == encoder.encoded_bytes(numel)

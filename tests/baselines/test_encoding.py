"""Codecs by name: what matrix files may say, and sizes against the library's codecs."""

import pytest

import fcdp
from baselines.encoding import encoded_bytes, gather, parse, reduction


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("none", None),
        ("int8", fcdp.BlockInt8()),
        ("int4", fcdp.BlockInt4()),
        ("int4(128)", fcdp.BlockInt4(128)),
    ],
)
def test_names_stand_for_codecs(text: str, codec: fcdp.Codec | None) -> None:
    assert parse(text) == codec


@pytest.mark.parametrize("text", ["int2", "int8()", "int8(-1)", "int8(0)", ""])
def test_anything_else_is_refused(text: str) -> None:
    for read in (parse, lambda codec: encoded_bytes(codec, 1)):
        with pytest.raises(ValueError, match="codec = .*: allowed are none, int8, int4"):
            read(text)


def test_gathers_may_tell_differences_and_reductions_may_be_coded_exactly() -> None:
    assert gather("delta") == fcdp.Delta()
    assert reduction("exact") == fcdp.Exact()
    assert gather("int4") == reduction("int4") == parse("int4")
    for when in ("always", "smallest"):
        assert gather(f"delta({when})") == fcdp.Delta(when)
    assert reduction("exact(always)") == fcdp.Exact("always")
    for read, codec, allowed in (
        (gather, "int2", "none, int8, int4.*delta"),
        (gather, "exact", "none, int8, int4.*delta"),
        (reduction, "int2", "none, int8, int4.*exact"),
        (parse, "delta", "none, int8"),
    ):
        with pytest.raises(ValueError, match=f"codec = '{codec}': allowed are {allowed}"):
            read(codec)


@pytest.mark.parametrize("codec", ["int8", "int4", "int8(128)", "int4(7)"])
@pytest.mark.parametrize("numel", [1, 63, 64, 257, 10**6 + 1])
def test_bytes_are_the_librarys(codec: str, numel: int) -> None:
    encoder = parse(codec)
    assert encoded_bytes(codec, numel) == encoder.encoded_bytes(numel)

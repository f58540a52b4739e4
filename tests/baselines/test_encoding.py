"""Sizes of what is quantised, against the library's codecs."""

from __future__ import annotations

import pytest

from baselines.encoding import encoded_bytes
from baselines.presets.codecs import parse


@pytest.mark.parametrize("codec", ["int8", "int4", "int8(128)", "int4(7)"])
@pytest.mark.parametrize("numel", [1, 63, 64, 257, 10**6 + 1])
def test_bytes_are_the_library_s(codec: str, numel: int) -> None:
    encoder = parse(codec)
    assert encoder is not None
    assert encoded_bytes(codec, numel) == encoder.encoded_bytes(numel)


@pytest.mark.parametrize("codec", ["int2", "int8(0)", "none"])
def test_other_codecs_are_refused(codec: str) -> None:
    with pytest.raises(ValueError, match="allowed are none, int8, int4"):
        encoded_bytes(codec, 1)

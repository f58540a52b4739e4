"""Zstandard's Huffman codes. What they come to is tested with the forms that have them."""

import runpy
import sys
from unittest import mock

import pytest

from fcdp.delta import huffman


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ((3, 13, 9), "backports.zstd"),
        ((3, 14, 0), "compression.zstd"),
        ((4, 0, 0), "compression.zstd"),
    ],
)
def test_zstandard_is_pythons_own_where_python_has_it(
    version: tuple[int, int, int], name: str
) -> None:
    with mock.patch.object(sys, "version_info", version):
        assert runpy.run_path(huffman.__file__)["ZSTD"] == name

"""Zstandard's Huffman codes. What they come to is tested with the forms that have them."""

import math
import runpy
import sys
from unittest import mock

import pytest
import torch

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


def test_bytes_that_repeat_by_chance_take_little_more_than_their_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.empty(2**19).geometric_(0.5, generator=generator).to(torch.uint8)
    shares = data.bincount().double() / len(data)
    entropy = -torch.special.xlogy(shares, shares).sum().item() / math.log(256) * len(data)
    assert entropy < huffman.write([data], 17).numel() < 1.01 * entropy

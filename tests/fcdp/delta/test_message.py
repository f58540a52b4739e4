"""A message leads from one version of a shard to the next, or is refused."""

from __future__ import annotations

import pytest
import torch

from fcdp.delta import message

DTYPES = sorted(message.DTYPES, key=str)


def _versions(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.randn(count, dtype=torch.float64)
    return (weights * (1 + 1e-4 * torch.randn(count))).to(dtype), weights.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 129, 5001])
def test_shards_of_each_dtype_arrive(count: int, dtype: torch.dtype) -> None:
    new, base = _versions(count, dtype)
    for version, before in ((7, base), (message.ALONE, None)):
        written = message.write(new, before, version)
        most = message.most_bytes(new)
        assert written.numel() <= most <= new.nbytes + 40
        row = base.clone()
        assert message.read(torch.cat([written, written.new_full((3,), 9)]), row, version)
        assert torch.equal(row.view(torch.uint8), new.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_and_another_version_are_told(dtype: torch.dtype) -> None:
    new, base = _versions(1000, dtype)
    written = message.write(new, base, 7)
    with pytest.raises(ValueError, match="from version 7 of a shard, of which 6 is here"):
        message.read(written, base.clone(), 6)
    if dtype.itemsize == 2:  # of wider ones nothing is held here that is small to tell
        with pytest.raises(ValueError, match="damaged|another checksum"):
            message.read(written, new.clone(), 7)  # not the base
    for length in (0, 8, 15, 16, 20):
        with pytest.raises(ValueError, match="cut|damaged"):
            message.read(written[:length], base.clone(), 7)
    with pytest.raises(ValueError, match="cut"):
        message.read(message.whole(new)[:-1], base.clone(), 7)
    for place in (17, 40, written.numel() - 3):
        damaged = written.clone()
        damaged[place] ^= 64
        row = base.clone()
        try:
            message.read(damaged, row, 7)
        except ValueError:
            continue
        assert torch.equal(row, new), place  # a count that this form does not have


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_whole_shard_is_told_from_a_difference_from_any_version(version: int) -> None:
    new, base = _versions(9, torch.bfloat16)
    row = base.clone()
    told = message.write(new, base, version)
    assert not message.is_whole(told)
    with pytest.raises(ValueError, match=f"from version {version} of a shard"):
        message.read(told, row, message.ALONE)
    assert message.is_whole(message.whole(new))
    assert not message.read(message.whole(new), row, version)
    assert torch.equal(row, new)

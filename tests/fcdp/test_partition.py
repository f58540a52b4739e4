"""Joining what is split off: by kind, in order, up to a bucket's size."""

from __future__ import annotations

import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from fcdp import partition
from fcdp.partition import Split, bucket, placement

TRAINED = (torch.float32, True)
FROZEN = (torch.bfloat16, False)


def make_splits(widths: list[tuple[int, bool]]) -> tuple[nn.Module, list[Split]]:
    """One split a block; the last belongs to the model itself."""
    model = nn.Module()
    splits = []
    for index, (width, trained) in enumerate(widths):
        block = model if index == len(widths) - 1 else nn.Module()
        linear = nn.Linear(width, 1, bias=False, device="meta")
        splits.append(Split(block, [linear], TRAINED if trained else FROZEN))
    return model, splits


@given(st.lists(st.tuples(st.integers(1, 4 * 2**20), st.booleans()), min_size=1, max_size=12))
def test_buckets_hold_everything_once_in_order_by_kind_and_below_the_limit(
    widths: list[tuple[int, bool]],
) -> None:
    model, splits = make_splits(widths)
    joined = bucket(splits, model)
    for key in (TRAINED, FROZEN):
        modules = [module for split in splits if split.key == key for module in split.modules]
        buckets = [split for split in joined if split.key == key]
        assert [module for split in buckets for module in split.modules] == modules
        for split in buckets:
            assert len(split.modules) == 1 or split.nbytes <= partition._BUCKET_BYTES
    assert joined[-1].block is not model or joined[-1].modules == splits[-1].modules


def test_neighbours_are_joined_until_a_bucket_is_full() -> None:
    model, splits = make_splits([(2**20, True)] * 14)  # 4 MiB each; six fit
    assert [len(split.modules) for split in bucket(splits, model)] == [6, 6, 1, 1]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 16),
)
def test_nothing_is_padded_where_a_dimension_is_even(shape: list[int], world_size: int) -> None:
    param = nn.Parameter(torch.empty(shape, device="meta"))
    found = placement(param, world_size)
    if found is None:
        rows, others = shape[0], shape[1:]
        assert rows >= world_size or not any(size % world_size == 0 for size in others)
    else:
        assert shape[0] < world_size
        assert shape[found.dim] % world_size == 0

"""The rules of parameter groups, on sizes and flags alone."""

from itertools import chain, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcdp import grouping

SIZES = st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=12)


@pytest.mark.parametrize(
    ("numel", "own", "kept"),
    [
        ({"frozen": 5, "trained": 4}, set(), "frozen"),
        ({"frozen": 4, "trained": 5}, set(), "trained"),
        ({"frozen": 5, "trained": 5}, set(), "frozen"),  # as the first
        ({"frozen": 5, "trained": 4}, {"trained"}, "trained"),
        ({"frozen": 5, "trained": 4}, {"trained", "frozen"}, "frozen"),
    ],
)
def test_a_block_keeps_what_it_holds_itself_or_has_most_of(
    numel: dict[str, int], own: set[str], kept: str
) -> None:
    assert grouping.kept(numel, own) == kept


def test_what_takes_a_rank_s_share_of_the_largest_block_stays_gathered() -> None:
    assert grouping.stay_gathered([3, 2], [40, 10], 8)
    assert not grouping.stay_gathered([3, 2.5], [40, 10], 8)
    assert grouping.stay_gathered([], [], 8)
    assert not grouping.stay_gathered([0.1], [], 8)


@given(SIZES)
def test_a_bucket_has_neighbours_of_one_kind_and_the_next_begins_where_it_is_full(
    parts: list[tuple[bool, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping, "BUCKET_BYTES", 20)
        buckets = grouping.buckets(parts)
    assert sorted(chain(*buckets)) == [*range(len(parts))]
    assert [bucket[0] for bucket in buckets] == sorted(bucket[0] for bucket in buckets)
    for kind in (False, True):
        of_kind = [bucket for bucket in buckets if parts[bucket[0]][0] == kind]
        together = [*chain(*of_kind)]
        assert together == [at for at, part in enumerate(parts) if part[0] == kind]
        sizes = [[parts[at][1] for at in bucket] for bucket in of_kind]
        assert all(sum(each) <= 20 for each in sizes)
        assert all(sum(full) + following[0] > 20 for full, following in pairwise(sizes))


def test_an_entry_is_what_the_other_nodes_have_sent() -> None:
    assert [grouping.entry_bytes(12, nodes) for nodes in (1, 2, 4)] == [0, 12, 36]


def test_a_frozen_unit_is_used_again_by_the_next_step_too() -> None:
    flags = product((False, True), repeat=2)
    counts = [grouping.reuses(in_backward=again, frozen=frozen) for again, frozen in flags]
    assert counts == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((4, 16), 1),
        ((1, 16), 1),
        ((4, 6, 16), 2),
        ((4, 16, 16), 1),
        ((8, 16), None),  # has a row for each rank
        ((4, 6), None),  # nothing divides evenly
        ((4,), None),
        ((), None),
        ((0, 16), None),  # there is nothing to cut
        ((4, 0), None),
    ],
)
def test_a_factor_of_fewer_rows_than_ranks_is_cut_where_that_is_even(
    shape: tuple[int, ...], dim: int | None
) -> None:
    assert grouping.cut(shape, 8) == dim


def test_partial_gradients_wait_on_a_device_up_to_a_tenth_of_its_free_memory() -> None:
    assert grouping.sums_fit(10, 100)
    assert not grouping.sums_fit(10.1, 100)


def test_a_disk_has_a_buffer_to_load_and_one_to_store_beside_those_read_ahead() -> None:
    assert grouping.disk_buffers(3) == 5

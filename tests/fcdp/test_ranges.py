"""Ranges in a profiler's timeline: named where one runs, free where none does."""

from __future__ import annotations

from unittest import mock

from torch.profiler import ProfilerActivity, profile

from fcdp import ranges


def test_a_profiler_sees_what_runs_inside_and_of_which_unit() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]) as seen,
        ranges.named("cache_load", "blocks.0"),
        ranges.named("reduce_intra"),
    ):
        pass
    names = {event.name for event in seen.events() or ()}
    assert {"fcdp::cache_load blocks.0", "fcdp::reduce_intra"} <= names


def test_without_a_profiler_nothing_is_named() -> None:
    with mock.patch("fcdp.ranges.record_function") as record, ranges.named("cache_load", "blocks"):
        record.assert_not_called()

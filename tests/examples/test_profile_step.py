"""The trace names every gather and reduction by unit, and shows forward prefetching."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples import profile_step
from fcdp.blocks import BLOCKS_AHEAD
from tests.examples.launch import printed
from tests.ranks import Pools

BLOCKS = ["model.layers.0", "model.layers.1", "model.layers.2"]


@dataclass(frozen=True)
class Range:
    """Times of the trace, in microseconds."""

    start: float
    end: float


def write_trace(path: str) -> list[str]:
    arguments = ["--nodes", "2", "--layers", str(len(BLOCKS)), "--trace", path]
    return printed(profile_step, arguments, ranks_per_node=2)


@pytest.fixture(scope="module")
def traced(
    ranks: Pools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], dict[str, list[Range]]]:
    """The lines that rank 0 printed, and its trace's ranges by name, in order of time."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    lines, *_ = ranks.run(4, write_trace, str(path))
    return lines, ranges_in(path)


def ranges_in(path: Path) -> dict[str, list[Range]]:
    events = json.loads(path.read_text())["traceEvents"]
    ranges: dict[str, list[Range]] = {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"])):
        start = float(event["ts"])
        ranges.setdefault(event["name"], []).append(Range(start, start + float(event["dur"])))
    return ranges


EXPECTED = {
    "gather_inter": {"root", *BLOCKS},
    "cache_store": {*BLOCKS},
    "gather_intra": {"root", *BLOCKS},
    "cache_load": {*BLOCKS},  # the root stays gathered from forward to backward
    "reduce_intra": {"root", *BLOCKS},
    "reduce_inter": {"root", *BLOCKS},
    "reduce_wait": {"root", *BLOCKS},
}


def test_every_range_names_its_unit(traced: tuple[list[str], dict[str, list[Range]]]) -> None:
    lines, ranges = traced
    units: dict[str, set[str]] = {}
    for name in ranges:
        if name.startswith("fcdp::"):
            kind, unit = name.removeprefix("fcdp::").split()
            units.setdefault(kind, set()).add(unit)
    assert units == EXPECTED
    assert {line.split()[0] for line in lines} == {
        *(f"fcdp::{kind}" for kind in EXPECTED),
        "trace:",
    }


def test_blocks_are_gathered_while_those_before_them_compute(
    traced: tuple[list[str], dict[str, list[Range]]],
) -> None:
    """The first two blocks' gathers begin together, before the first block computes; each later
    one's a block further on."""
    _, ranges = traced
    gathers = [ranges[f"fcdp::gather_inter {block}"][0] for block in BLOCKS]
    # FSDP2's own ranges, before and after the block's forward.
    begins = [ranges[f"FSDP::pre_forward ({block})"][0] for block in BLOCKS]
    ends = [ranges[f"FSDP::post_forward ({block})"][0] for block in BLOCKS]
    for gather in gathers[:BLOCKS_AHEAD]:
        assert gather.end <= begins[0].start
    for before, gather in zip(range(len(BLOCKS)), gathers[BLOCKS_AHEAD:], strict=False):
        assert begins[before].end <= gather.start <= gather.end <= ends[before].start


def test_a_gather_crosses_once_and_is_stored_before_it_is_loaded(
    traced: tuple[list[str], dict[str, list[Range]]],
) -> None:
    _, ranges = traced
    for block in BLOCKS:
        (crossing,) = ranges[f"fcdp::gather_inter {block}"]
        (store,) = ranges[f"fcdp::cache_store {block}"]
        (load,) = ranges[f"fcdp::cache_load {block}"]
        assert crossing.end <= store.start <= store.end <= load.start

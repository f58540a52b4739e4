"""Memory by the imitation agrees with what is known of each strategy's memory."""

import pytest

from experiments.commands.memory import build
from simulation.imitated import study
from simulation.imitated.records import Case, MemoryUse
from simulation.imitated.study import PAPER_MICRO_BATCH
from tests.ranks import Pools
from tests.simulation.imitated.small import WIDTH, case, measure

BLOCK = 12 * WIDTH**2 + 13 * WIDTH
NODES, RANKS_PER_NODE, WORLD = 4, 8, 32
#: Small parameters are rounded up to the allocator's blocks of 512 bytes, on each of 32 ranks.
ROUNDING = 1.05


def at_paper(use: MemoryUse) -> int:
    return next(p.device_bytes for p in use.peaks if p.micro_batch == PAPER_MICRO_BATCH)


STRATEGIES = ["fsdp2", "fcdp", "hpz", "fsdp2-hsdp", "fsdp2-offload", "fcdp-offload"]


@pytest.fixture(scope="module")
def uses(apart: Pools) -> dict[str, MemoryUse]:
    return {strategy: apart.run(1, measure, case(strategy))[0] for strategy in STRATEGIES}


def test_between_steps_a_rank_keeps_its_part_of_parameters_and_states(
    uses: dict[str, MemoryUse],
) -> None:
    """Parameters and two Adam moments, in fp32."""
    total = 12 * uses["fsdp2"].parameters
    assert 1 <= uses["fsdp2"].resting_device_bytes / (total / WORLD) < ROUNDING
    assert 1 <= uses["fsdp2-hsdp"].resting_device_bytes / (total / RANKS_PER_NODE) < ROUNDING
    assert uses["fsdp2-offload"].resting_device_bytes <= 512  # the last loss
    assert uses["fcdp-offload"].resting_device_bytes < uses["fcdp"].resting_device_bytes / 50


def test_the_host_cache_costs_the_device_at_most_two_slices(uses: dict[str, MemoryUse]) -> None:
    """Slices in flight (design.md, invariant 3) are one that is filled and one that is read."""
    extra = at_paper(uses["fcdp"]) - at_paper(uses["fsdp2"])
    assert 0 < extra <= 2 * (2 * BLOCK / RANKS_PER_NODE + 512)
    assert uses["fcdp"].largest_micro_batch == uses["fsdp2"].largest_micro_batch


def test_the_host_holds_what_other_nodes_have(uses: dict[str, MemoryUse]) -> None:
    expected = 2 * uses["fcdp"].parameters * (NODES - 1) / NODES
    cache = uses["fcdp"].host_cache_bytes_per_node
    assert 1 <= cache / expected < 1.1  # pages of 4096 bytes
    assert uses["fcdp"].peaks[0].host_bytes * RANKS_PER_NODE >= cache
    assert uses["hpz"].host_cache_bytes_per_node == 0
    assert uses["fsdp2"].host_cache_bytes_per_node is None
    offloaded = uses["fsdp2-offload"].peaks[0].host_bytes
    assert offloaded >= 16 * uses["fsdp2-offload"].parameters / WORLD


def test_the_largest_micro_batch_was_run_and_the_next_too(uses: dict[str, MemoryUse]) -> None:
    usable = case("fsdp2").usable_bytes
    for use in uses.values():
        by_size = {peak.micro_batch: peak.device_bytes for peak in use.peaks}
        largest = use.largest_micro_batch
        assert by_size[largest] <= usable < by_size[largest + 1]


def test_the_threshold_looks_at_the_device_that_is_imitated(apart: Pools) -> None:
    below, above = (
        apart.run(1, measure, case("fcdp", policy=f"threshold({tau})"))[0] for tau in (1, 0)
    )
    assert below.resting_device_bytes > above.resting_device_bytes


def test_a_case_without_figures_says_why() -> None:
    """A failure is a record too, and does not end the others."""
    cases = [
        case("ddp", device_bytes=2 * 10**6),
        case("ddp"),
        case("deepspeed-zero3"),
        case("fcdp", policy="nonsense"),
    ]
    records = sorted(
        study.settle(cases, 1, build, commit=None, versions={}),
        key=lambda record: cases.index(record.case),
    )
    assert [record.state for record in records] == ["oom", "skipped", "skipped", "failed"]
    reasons = [record.error or "" for record in records]
    for part, reason in zip(
        ("needs more than", "contents", "DeepSpeed", "nonsense"), reasons, strict=True
    ):
        assert part in reason
    assert all(record.finding is None for record in records)


def test_cases_are_the_product_and_unknown_strategies_are_refused() -> None:
    everything = study.cases()
    assert len({each.model_dump_json() for each in everything}) == len(everything)
    assert len(everything) == len(study.STRATEGIES) * 3 * 2 * 2 * len(study.SEQUENCE_LENGTHS)
    only: list[Case] = study.cases(strategies=["hpz"])
    assert {each.strategy for each in only} == {"hpz"}
    with pytest.raises(ValueError, match="strategy = 'fcpd': allowed are .*fcdp"):
        study.cases(strategies=["fcpd"])
    assert {each.sequence_length for each in study.cases(lengths=[1024])} == {1024}
    with pytest.raises(ValueError, match="length = 4096: allowed are 512, 1024, 2048"):
        study.cases(lengths=[4096])

"""The ledger's bytes equal the closed forms (design.md, invariant 5; the kernel's count is compared
in tests/experiments), and a profiler's timeline names what runs."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fcdp
from fcdp.counts import Ledger, profiled
from fcdp.engine import engine_of
from tests.fcdp.training import Result, Run, Settings, train
from tests.ranks import Pools


def node_bytes(result: Result, settings: Settings, link: str, phase: str) -> float:
    """Bytes of one node a step."""
    count = result.ledger.get(link, {}).get(phase, 0)
    return settings.ranks_per_node * count / settings.steps


def gathered_bytes(settings: Settings) -> tuple[int, int]:
    """Padded bytes of all units and of the trainable ones, from the units' own layout."""
    sizes = [
        (unit.shard_bytes * settings.world_size, unit.params[0].requires_grad)
        for unit in engine_of(Run(settings).model).units
    ]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(3, 1), (2, 2)])
def test_a_full_step_sends_each_parameter_across_once_and_each_gradient_once(
    ranks: Pools, nodes: int, ranks_per_node: int
) -> None:
    settings = Settings(nodes, ranks_per_node)
    result = ranks.run(settings.world_size, train, settings, "fcdp")[0]
    total, _ = ranks.run(settings.world_size, gathered_bytes, settings)[0]
    across = (nodes - 1) / nodes * total
    assert node_bytes(result, settings, "inter_node", "forward") == across
    assert node_bytes(result, settings, "inter_node", "backward") == 0
    assert node_bytes(result, settings, "inter_node", "reduce") == across
    for phase in ("forward", "reduce"):
        assert node_bytes(result, settings, "intra_node", phase) == (ranks_per_node - 1) * total
    # What backward reads again is stored once: the blocks, and not the root.
    stored = node_bytes(result, settings, "device_to_host", "forward")
    assert 0 < stored < across
    assert node_bytes(result, settings, "host_to_device", "backward") == stored
    assert (result.hits, result.misses) == (2 * settings.steps, 3 * settings.steps)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(3, 1), (2, 2)])
def test_flat_exchanges_send_all_but_one_ranks_part_and_gradients_of_each_micro_batch(
    ranks: Pools, nodes: int, ranks_per_node: int
) -> None:
    """As ``simulation.traffic.flat`` counts; backward gathers inside the node from the cache.

    Hierarchical ones of several micro-batches add nothing between nodes.
    """
    ours = Settings(nodes, ranks_per_node, accumulation=2)
    settings = replace(ours, exchanges="flat")
    hierarchical, result = (
        ranks.run(settings.world_size, train, each, "fcdp")[0] for each in (ours, settings)
    )
    total, _ = ranks.run(settings.world_size, gathered_bytes, settings)[0]
    for phase in ("forward", "reduce"):
        once = (nodes - 1) / nodes * total
        assert node_bytes(hierarchical, ours, "inter_node", phase) == once
    across = total - total / settings.world_size
    assert node_bytes(result, settings, "inter_node", "forward") == across
    assert node_bytes(result, settings, "inter_node", "backward") == 0
    assert node_bytes(result, settings, "inter_node", "reduce") == 2 * across
    for link in ("intra_node", "host_to_device"):
        read = node_bytes(result, settings, link, "backward")
        assert read == node_bytes(hierarchical, settings, link, "backward")
    assert (result.hits, result.misses) == (hierarchical.hits, hierarchical.misses)


def test_frozen_parameters_cross_once_ever(ranks: Pools) -> None:
    settings = Settings(2, 2, adapter_rank=3, steps=3)
    result = ranks.run(4, train, settings, "fcdp")[0]
    total, trainable = ranks.run(4, gathered_bytes, settings)[0]
    gathers = total / 2 + (settings.steps - 1) * trainable / 2
    assert node_bytes(result, settings, "inter_node", "forward") * settings.steps == gathers
    assert node_bytes(result, settings, "inter_node", "reduce") == trainable / 2
    assert trainable < total / 4


def test_reductions_travel_in_the_reduce_dtype(ranks: Pools) -> None:
    sent = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = Settings(2, 1, param_dtype=torch.bfloat16, reduce_dtype=dtype)
        sent[dtype] = ranks.run(2, train, settings, "fcdp")[0].ledger["inter_node"]
    assert sent[torch.float32]["reduce"] == 2 * sent[torch.bfloat16]["reduce"]
    assert sent[torch.float32]["forward"] == sent[torch.bfloat16]["forward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_reductions_without_a_reduce_dtype_travel_in_what_this_torch_takes_for_it(
    ranks: Pools, dtype: torch.dtype | None
) -> None:
    """Until torch 2.14 that is the dtype of gathers, from 2.15 on the parameters' own."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    taken = dtype or (torch.float32 if release >= (2, 15) else torch.bfloat16)
    settings = Settings(2, 2, param_dtype=torch.bfloat16, reduce_dtype=dtype)
    result = ranks.run(4, train, settings, "fcdp")[0]
    assert result.reduce_dtypes == {str(taken).removeprefix("torch.")}
    numel = ranks.run(4, reduced_numel, settings, taken)[0]
    assert node_bytes(result, settings, "inter_node", "reduce") == numel / 2 * taken.itemsize


def reduced_numel(settings: Settings, dtype: torch.dtype) -> int:
    """Padded elements of all units, each of which says that it is reduced in this dtype."""
    units = engine_of(Run(settings).model).units
    assert {unit.reduce_dtype for unit in units} == {dtype}
    return settings.world_size * sum(unit.shard_numel for unit in units)


def test_a_single_node_crosses_nothing_and_stores_nothing(ranks: Pools) -> None:
    result = ranks.run(2, train, Settings(1, 2), "fcdp")[0]
    assert set(result.ledger) == {"intra_node"}
    assert result.hits == result.misses == 0


def test_reset_starts_a_new_window_and_keeps_what_is_held() -> None:
    ledger = Ledger(hits=2, misses=1)
    ledger.add("inter_node", "forward", 3)
    ledger.hold(100)
    ledger.hold(-60)
    assert (ledger.total("inter_node"), ledger.peak_pending_bytes) == (3, 100)
    ledger.reset()
    assert (ledger.total("inter_node"), ledger.pending_bytes, ledger.peak_pending_bytes) == (
        0,
        40,
        40,
    )
    assert ledger.hits == ledger.misses == 0


def pending_peak(settings: Settings) -> tuple[int, int, int]:
    """Return the peak of waiting gradient bytes, those in the end, and the closed form."""
    run = Run(settings)
    for last in (False, True):
        with fcdp.accumulate(run.model, last=last):
            run.loss().backward()
    counts = fcdp.ledger(run.model)
    shards = sum(unit.shard_bytes for unit in engine_of(run.model).units)
    return counts.peak_pending_bytes, counts.pending_bytes, settings.nodes * shards


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_deferred_sums_take_a_slice_of_the_gradients_in_fp32(
    ranks: Pools, param_dtype: torch.dtype | None
) -> None:
    settings = Settings(2, 2, param_dtype=param_dtype)
    peak, pending, closed_form = ranks.run(4, pending_peak, settings)[0]
    widening = 1 if param_dtype is None else 2
    assert peak == closed_form * widening
    assert pending == 0


def test_a_profiler_sees_what_runs_inside_and_of_which_unit() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]) as seen,
        profiled("cache_load", "blocks.0"),
        profiled("reduce_intra"),
    ):
        pass
    names = {event.name for event in seen.events() or ()}
    assert {"fcdp::cache_load blocks.0", "fcdp::reduce_intra"} <= names


def test_without_a_profiler_nothing_is_named() -> None:
    with mock.patch("fcdp.counts.record_function") as record, profiled("cache_load", "blocks"):
        record.assert_not_called()

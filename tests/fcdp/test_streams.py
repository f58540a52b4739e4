"""Training on an accelerator's streams: equal to FSDP2, and no schedule that waits allow is wrong.

The library, FSDP2 and the optimizers run on the accelerator of tests/fcdp/accelerator, several
ranks in one process. For each pair of operations on the same bytes it is shown that waits order
them; schedules drawn from seeds are run besides.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.cache.memory import Usage
from fcdp.engine import engine_of
from fcdp.grouping import PartialsChoice
from tests.fcdp import training
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.stand_ins import OwnAllGather
from tests.fcdp.training import Settings
from tests.ranks import Pools

#: Schedules that are drawn of each run: 200 of all runs, and 2,000 with ``--exhaustive``.
SCHEDULES, MANY_SCHEDULES = 8, 80

LORA = Settings(adapter_rank=3, steps=3)
SMALL = Settings(steps=2)

#: Trainings, by name. Shapes are 2 × 2 unless said otherwise.
TRAININGS: dict[str, Settings] = {
    "host": Settings(steps=3, events={2: "eval"}),
    "none": replace(SMALL, policy=fcdp.NoCache()),
    "device": replace(SMALL, policy=fcdp.DeviceCache()),
    # Without detection, for which the host waits now and then, as AdamW does in its first step.
    "host, none ahead, poisoned": Settings(steps=3, look_ahead=0, poison=True, detect_writes=False),
    "host, verified": replace(SMALL, verify=True),
    "disk": Settings(steps=3),
    "LoRA, taken over": replace(LORA, accumulation=2),
    "micro-batches": Settings(steps=2, accumulation=2, clip=0.5),
    "flat, micro-batches": Settings(steps=2, accumulation=2, clip=0.5, exchanges="flat"),
    "micro-batches, on the host": Settings(steps=2, accumulation=3, partial_gradients="host"),
    # One trained unit: its sum comes in right after it went out.
    "LoRA, micro-batches, on the host": Settings(
        adapter_rank=1, steps=2, accumulation=3, partial_gradients="host"
    ),
    "micro-batches, each reduced": Settings(steps=2, accumulation=2, partial_gradients="each"),
    "offloaded": Settings(steps=3, accumulation=2, offload=True),
    "differences": Settings(
        steps=5, gather_codec=fcdp.Delta(), events={2: "eval", 3: "write"}, accumulation=2
    ),
    "differences, poisoned": Settings(
        3, 1, steps=3, poison=True, look_ahead=0, verify=True, gather_codec=fcdp.Delta()
    ),
    "disk, differences": Settings(steps=3, gather_codec=fcdp.Delta()),
    "device, differences": Settings(
        steps=3, gather_codec=fcdp.Delta(), policy=fcdp.DeviceCache(), detect_writes=False
    ),
    "codecs": Settings(
        3, 1, steps=2, gather_codec=fcdp.BlockInt8(), reduce_codec=fcdp.BlockInt8(), accumulation=2
    ),
    "mixed precision": replace(SMALL, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "packed weights": replace(LORA, extension="packed", events={2: "eval"}),
    "a collective of one's own": Settings(steps=3, accumulation=2, intra_node=OwnAllGather()),
    "two meshes": Settings(steps=3, accumulation=2, apart=True, events={2: "eval"}),
    "replicas": Settings(4, 1, steps=2, accumulation=2, replicas=2),
    "two meshes, differences": Settings(steps=3, gather_codec=fcdp.Delta(), apart=True),
    "rounded to be sent": Settings(extension="rounded", steps=3, accumulation=2),
    "half precision, micro-batches": replace(
        SMALL, accumulation=3, param_dtype=torch.float16, reduce_dtype=torch.float16
    ),
    "replicas, on the host": Settings(
        4, 1, steps=2, accumulation=3, replicas=2, partial_gradients="host"
    ),
}
#: Where gradients are rounded: FSDP2 rounds them elsewhere.
ROUNDED = {"codecs": 0.1, "mixed precision": 2e-2, "half precision, micro-batches": 2e-2}


def train(name: str, settings: Settings, directory: Path, engine: str) -> training.Result:
    if name.startswith("disk"):
        settings = replace(settings, policy=fcdp.DiskCache(directory))
    return training.train(settings, engine)


def compare(name: str, directory: Path, seeds: range) -> list[str]:
    """List faults of a training on the accelerator: differences from FSDP2's, races, streams."""
    from tests.fcdp import accelerator

    settings = TRAININGS[name]
    theirs, tape = accelerator.run(
        train, settings.world_size, name, settings, directory, "fsdp2", seed=seeds[0]
    )
    wrong = [f"FSDP2's own: {race}" for race in tape.races[:1]]
    engine = "takeover" if name.endswith("taken over") else "fcdp"
    engine = "cached" if settings.apart or settings.replicas > 1 else engine
    ours, tape = accelerator.run(
        train, settings.world_size, name, settings, directory, engine, seed=seeds[0]
    )
    tolerance = ROUNDED.get(name, 1e-5)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for what in ("losses", "norms"):
            actual, expected = getattr(mine, what), getattr(other, what)
            if actual != pytest.approx(expected, rel=tolerance, abs=tolerance):
                wrong.append(f"rank {rank}: {what} {actual}, not {expected}")
    # On another stream they would compute the same, and wait for copies the other way.
    if name in TIERS and (copies := copies_of(tape)) != COPIES:
        wrong.append(f"copies are {copies}, not {COPIES}")
    problem = accelerator.check(tape, seeds)
    return [*wrong, *([problem] if problem else [])]


TIERS = ("device", "host", "disk")
COPIES = {("store", "copies_out"), ("load", "copies_in")}


def copies_of(tape: Any) -> set[tuple[str, str]]:
    """List what copies for a tier, by the tier's own method, and on which stream."""
    calls = set()
    for operation in tape.operations:
        copies, *callers = operation.where.split(" < ")
        if copies.endswith(" copy") and [each[:9] for each in callers] == ["tiers.py:"] * 2:
            way = callers[1].split()[1]
            calls.add((way, operation.timeline.name.split("'")[1]))
    return calls


@pytest.mark.parametrize("name", TRAININGS)
def test_training_equals_fsdp2_in_every_schedule(
    apart: Pools, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each tier also copies on its streams."""
    exhaustive = request.config.getoption("--exhaustive")
    first = 1000 * [*TRAININGS].index(name)
    seeds = range(first, first + (MANY_SCHEDULES if exhaustive else SCHEDULES))
    (wrong,) = apart.run(1, compare, name, tmp_path, seeds)
    assert not wrong, "\n".join(wrong)


def exchanges_of(directory: Path) -> list[set[tuple[str, str]]]:
    """List the exchanges on the device with their groups and streams; three nodes of two.

    Hierarchical ones, and those of flat exchanges.
    """
    from tests.fcdp import accelerator

    settings = replace(SMALL, nodes=3, ranks_per_node=2, steps=1)

    def recorded(settings: Settings) -> Any:
        return accelerator.run(train, 6, "host", settings, directory, "fcdp")[1]

    tapes = [accelerator.run(unshard_early, 6, 3, 2)[1], recorded(settings)]
    with mock.patch("fcdp.all_gather.PARTS_MOST", 1):  # as with many nodes
        tapes.append(recorded(settings))
    codecs = {"gather_codec": fcdp.Delta(), "reduce_codec": fcdp.BlockInt8()}
    tapes.append(recorded(replace(settings, steps=2, **codecs)))
    flat = recorded(replace(settings, exchanges="flat"))
    return [
        {
            (operation.what, stream[1])
            for tape in some
            for operation in tape.operations
            if "-" in operation.what.split(" of ")[0] and not operation.what.endswith("send")
            # Set-up exchanges on the computing stream, which has no name.
            if len(stream := operation.timeline.name.split("'")) > 1
        }
        for some in (tapes, [flat])
    ]


@pytest.mark.system  # a quarter of a minute
def test_each_exchange_has_its_group_and_its_stream(apart: Pools, tmp_path: Path) -> None:
    """Another group or stream would compute the same, after needless waits."""
    ((hierarchical, flat),) = apart.run(1, exchanges_of, tmp_path)
    in_node = ("all-gather of 2 in fcdp_gather", "all_gather_stream")
    assert hierarchical == {
        in_node,
        ("all-gather of 3 in fcdp_gather", "inter_node"),
        ("all-gather of 2 in fcdp_gather", "intra_node"),  # what is asked for early
        ("reduce-scatter of 2 in fcdp_reduce", "reduce_scatter_stream"),
        ("reduce-scatter of 3 in fcdp_reduce", "reduce_scatter_stream"),
        ("all-to-all of 3 in fcdp_reduce", "reduce_scatter_stream"),  # of coded parts
    }
    assert flat == {
        in_node,  # of what the cache holds
        ("all-gather of 6 in default_pg", "inter_node"),
        ("reduce-scatter of 6 in default_pg", "reduce_scatter_stream"),
    }


def outputs_kept(nodes: int, ranks_per_node: int) -> int:
    """How many slices one pass keeps that no copy to the host reads."""
    run = training.Run(Settings(nodes, ranks_per_node, policy=fcdp.NoCache()))
    with torch.no_grad():
        run.loss()
    gather, _ = next(iter(engine_of(run.model)._collectives.values()))
    return len(gather._slices._released)


def test_fsdp2s_outputs_are_not_kept_without_a_copy_to_the_host(streams: OnStreams) -> None:
    """With one rank per node they are the slices."""
    assert streams.run(2, outputs_kept, 2, 1) == [0, 0]


def drop_what_is_read(nodes: int, ranks_per_node: int) -> None:
    """Drop the device's entries as soon as a pass that reads them is queued, and use the memory."""
    model = training.Run(Settings(nodes, ranks_per_node, policy=fcdp.DeviceCache())).model
    cache = engine_of(model).cache
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(2):
            model(tokens)
    sizes = [area.rows.numel() for area in cache._device_tier._areas.values()]
    for entry in cache._entries.values():
        cache._forget(entry)
    streams = cache._streams
    with streams.on(streams.copies_out):
        for size in sizes:
            torch.zeros(size, dtype=torch.uint8, device="taped")


def test_memory_of_the_device_tier_is_let_go_behind_its_readers(streams: OnStreams) -> None:
    streams.run(4, drop_what_is_read, 2, 2)


def unshard_early(nodes: int, ranks_per_node: int) -> list[float]:
    """Blocks gathered by ``unshard(async_op=True)`` while others compute, as users do.

    Frozen ones come from the cache from the second step on, where the host waits for nothing.
    """
    settings = replace(LORA, nodes=nodes, ranks_per_node=ranks_per_node, detect_writes=False)
    run, losses = training.Run(settings), []
    for _ in range(settings.steps):
        handles = [block.unshard(async_op=True) for block in run.model.blocks]  # type: ignore[operator]
        for handle in handles:
            handle.wait()
        training.update(loss := run.loss(), run.optimizer)
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def test_blocks_that_are_asked_for_early_arrive_in_every_schedule(streams: OnStreams) -> None:
    streams.run(4, unshard_early, 2, 2)


def reserved_after(passes: int, engine: str, ranks_per_node: int, policy: Any) -> tuple[int, int]:
    """Device memory that training steps have taken, and the largest slice."""
    from tests.fcdp.accelerator import here

    settings = replace(SMALL, ranks_per_node=ranks_per_node, policy=policy, detect_writes=False)
    run = training.Run(settings, engine)
    before = here().reserved_bytes
    for _ in range(passes):
        run.loss().backward()
        for param in run.model.parameters():
            param.grad = None
    taken = here().reserved_bytes - before
    if engine == "fsdp2":
        return taken, 0
    size = 2 * max(unit.shard_bytes for unit in engine_of(run.model).units)
    return taken, -(-size // 512) * 512  # as the allocator gives it


@pytest.mark.parametrize("ranks_per_node", [1, pytest.param(2, marks=pytest.mark.system)])
def test_device_memory_is_fsdp2s_and_slices_in_flight_however_far_the_host_runs(
    apart: Pools, ranks_per_node: int
) -> None:
    """With ``record_stream`` each gather would take new memory until the device has caught up."""
    streams = OnStreams(apart, schedules=0)

    def after(passes: int, engine: str, policy: Any = None) -> tuple[int, int]:
        arguments = (passes, engine, ranks_per_node, policy)
        return max(streams.run(2 * ranks_per_node, reserved_after, *arguments))

    theirs, _ = after(6, "fsdp2")
    uncached, _ = after(6, "fcdp", fcdp.NoCache())
    one, _ = after(1, "fcdp", fcdp.HostCache())
    many, size = after(6, "fcdp", fcdp.HostCache())
    # The cache's: what is fetched ahead, and what is read beside it. The exchanges': slices
    # across nodes, and sums of the node's gradients. The guard's: sums and flags of all units, in
    # at most four of the allocator's smallest pieces.
    assert many <= uncached + 4 * size
    assert many <= one + 4 * size
    assert many <= theirs + 8 * size + 4 * 512


def copies_of_sums(directory: Path) -> list[str]:
    """Faults of a training whose sums wait on the host: reductions that wait for a copy out."""
    from tests.fcdp import accelerator

    name = "micro-batches, on the host"
    settings = replace(TRAININGS[name], steps=1)
    _, tape = accelerator.run(train, 4, name, settings, directory, "fcdp")
    out = {of_rank(each): each for each in tape.timelines if "'sums_out'" in each.name}
    reduce = {each.timeline for each in tape.operations if _adds(each)}
    #: The last micro-batch copies none out, and waits for its own sums.
    copied = {rank: len(timeline.operations) for rank, timeline in out.items()}
    issued, faults, waited = dict.fromkeys(out, 0), [], 0
    known: dict[Any, dict[Any, int]] = {each: {} for each in tape.timelines}
    for operation in tape.operations:
        timeline, rank = operation.timeline, of_rank(operation.timeline)
        known[timeline].update(operation.after)
        if "'sums_out'" in timeline.name:
            issued[rank] += 1
        elif timeline in reduce:  # an addition, or a reduction inside the node
            seen = known[timeline].get(out[rank], 0)
            waited = max(waited, seen)
            if 0 < issued[rank] <= seen and issued[rank] < copied[rank]:
                faults.append(f"{operation} waits for the copy out before it")
    return faults if waited else ["no addition waits for any copy: nothing was seen"]


def _adds(operation: Any) -> bool:
    """Whether an operation adds gradients of a micro-batch to a sum."""
    where: str = operation.where
    on_sums = "'sums_" in operation.timeline.name
    return not on_sums and where.startswith("partial_gradients.py:") and " add <" in where


def of_rank(timeline: Any) -> str:
    return str(timeline.name.rsplit(" ", 1)[-1])


def test_no_reduction_waits_for_the_copy_of_the_sum_before(apart: Pools, tmp_path: Path) -> None:
    """Two staging buffers: one unit's sum goes out while the next one's comes in and is added to.

    A reduction waits for its own sum and, by its staging buffer, for the one before the last.
    """
    (faults,) = apart.run(1, copies_of_sums, tmp_path)
    assert not faults, "\n".join(faults)


def sums_of_a_step(settings: Settings) -> tuple[int, int, int]:
    """Bytes of sums: on the host after set-up and after the first micro-batch; on the device."""
    run = training.Run(settings)
    counts = fcdp.ledger(run.model)
    at_set_up = counts.host_partials_bytes
    for last in (False, True):
        with fcdp.accumulate(run.model, last=last):
            run.loss().backward()
    run.optimizer.step()
    staging = engine_of(run.model)._partials._staging
    assert not staging._released, "staging buffers are held while the optimizer steps"
    return at_set_up, counts.host_partials_bytes, counts.peak_pending_bytes


def sums_with(
    choice: PartialsChoice, free: dict[int, int], free_on_host: int = 2**40
) -> list[tuple[int, int, int]]:
    """Sums of each rank where a rank's device, and the host, have so much memory free."""
    from tests.fcdp import accelerator

    def usage(device: torch.device) -> Usage:
        free_here = free.get(accelerator.here().rank, 2**40)
        return Usage(2**40 - free_here, 0, 2**40)

    with (
        mock.patch("fcdp.cache.memory.device_usage", usage),
        mock.patch("fcdp.cache.memory.available_host_memory", return_value=free_on_host),
    ):
        settings = replace(SMALL, policy=fcdp.NoCache(), partial_gradients=choice)
        return [*accelerator.run(sums_of_a_step, 4, settings)[0]]


@pytest.mark.system
def test_sums_wait_where_there_is_room_for_them(apart: Pools) -> None:
    """A tenth of the device's free memory decides, alike on all ranks."""
    (plenty,) = apart.run(1, sums_with, "auto", {})
    nbytes = plenty[0][2]
    assert nbytes > 0
    assert plenty == [(0, 0, nbytes)] * 4
    (just,) = apart.run(1, sums_with, "auto", {2: 10 * nbytes})
    assert just == plenty
    less = {2: 10 * nbytes - 1}
    (short,) = apart.run(1, sums_with, "auto", less)
    on_host = short[0][1]
    assert on_host >= nbytes
    assert short == [(0, on_host, 0)] * 4  # who does not accumulate has no host memory taken
    (short_on_both,) = apart.run(1, sums_with, "auto", less, nbytes)
    assert short_on_both == plenty
    (asked,) = apart.run(1, sums_with, "host", {})
    assert asked == [(on_host, on_host, 0)] * 4


def skip_what_was_fetched(nodes: int, ranks_per_node: int) -> tuple[bool, bool]:
    """Whether a block is staged after a pass that it was left out of; and after the next began."""
    model = training.Run(Settings(nodes, ranks_per_node)).model
    cache = engine_of(model).cache
    first, second = model.blocks
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)
        model(tokens)
        x = torch.zeros(1, training.WIDTH)
        first(x)
        staged = [entry.staged is not None for entry in cache._entries.values()]
        cache.begin_pass()
        after = [entry.staged is not None for entry in cache._entries.values()]
    assert second is not first
    return any(staged), any(after)


def test_what_was_fetched_ahead_for_another_path_is_let_go_when_the_next_pass_begins(
    streams: OnStreams,
) -> None:
    """It would keep device memory, and others from being fetched ahead, until it is read."""
    assert streams.run(4, skip_what_was_fetched, 2, 2) == [(True, False)] * 4

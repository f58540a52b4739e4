"""A save that fails harms no checkpoint; what does not fit is refused on every rank.

Ranks are killed at three places of a save, with ``pytest --exhaustive`` at twenty.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import fcdp
from fcdp.checkpoint import saving
from tests.disks import full_disk
from tests.fcdp.checkpoints import (
    PLAIN,
    Run,
    assert_equal,
    errors_of,
    kill_at,
    on_each_change,
    trained,
)
from tests.fcdp.training import WIDTH, Settings, make_model, make_optimizer, shard_with_fcdp
from tests.ranks import Pools, RankFailure, RankPool, on_ranks


def _no_space(*args: Any) -> None:
    raise OSError(28, "No space left on device")


#: Causes of failure, and what the error says: a step of the save, on rank 1 or, of the commit,
#: where it runs; or a disk that is full, in the middle of rank 1's shards or of ``state.pt``.
FAILURES: dict[str, tuple[tuple[str, ...], bool]] = {
    "prepare_local_plan": (("rank 1: ", "No space left"), False),
    "write_data": (("rank 1: ", "No space left"), True),
    "replace": (("rank 0: ", "No space left"), True),
    "full, shards": (("rank 1: ", "File too large", "__1_0.distcp"), False),
    "full, state.pt": (("rank 0: ", "File too large", "state.pt"), False),
}


@contextmanager
def failing(what: str, rank: int, biggest: int) -> Iterator[None]:
    """Have a save fail, whose largest file has so many bytes."""
    if what == "full, state.pt":  # there is room for all but what the user adds to it
        with full_disk(biggest):
            yield
    elif what == "full, shards":
        with full_disk(biggest // 2) if rank == 1 else nullcontext():
            yield
    else:
        owner = os if what == "replace" else FileSystemWriter
        fails = what == "replace" or rank == 1
        with mock.patch.object(owner, what, _no_space) if fails else nullcontext():
            yield


@pytest.mark.parametrize("what", FAILURES)
@on_ranks(2)
def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path: Path, what: str) -> None:
    run, notes = Run(), tmp_path / "notes"
    notes.write_text("the user's")
    run.train(1)
    run.save(tmp_path)
    expected = run.train(2)
    biggest = max(path.stat().st_size for path in tmp_path.glob("shards-*/*"))
    extra = {"more": torch.zeros(biggest)} if what == "full, state.pt" else None
    words, asynchronous = FAILURES[what]
    with failing(what, run.topology.rank, biggest), pytest.raises(RuntimeError) as error:
        fcdp.save(
            run.model, run.optimizer, tmp_path, extra=extra, asynchronous=asynchronous
        ).result()
    for each in (f"{tmp_path}: cannot be written: ", *words):
        assert each in str(error.value)
    resumed = Run(seed=1)
    resumed.load(tmp_path)
    assert resumed.train(2) == expected
    assert len(list(tmp_path.glob("shards-*"))) == 1
    assert notes.exists()


@on_ranks(2)
def test_a_rank_without_memory_for_a_copy_stops_the_save_on_all(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    own, to = run.topology.rank == 1, torch.Tensor.to

    def full(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if options.get("copy"):
            raise MemoryError("no room")
        return to(tensor, *arguments, **options)

    fails = mock.patch.object(torch.Tensor, "to", full) if own else nullcontext()
    with fails, pytest.raises(MemoryError if own else RuntimeError, match="no room"):
        run.save(tmp_path, asynchronous=True)
    run.save(tmp_path)
    expected = run.train(2)
    resumed = Run(seed=1)
    resumed.load(tmp_path)
    assert resumed.train(2) == expected


@on_ranks(2)
def test_nodes_without_a_common_folder_hear_of_it_at_the_first_save(tmp_path: Path) -> None:
    """Not only at the load, which lacks the others' files, when the run is lost."""
    run = Run()
    lost = "is not there for rank 0; must be on a file system that all nodes share"
    with pytest.raises(RuntimeError, match=lost):
        run.save(tmp_path / f"node{run.topology.rank}")
    assert not (tmp_path / "node0/state.pt").exists()


#: Another program, between its commit and tidying up: for so long, or until it is told.
HOLDS = """
import fcntl, select, sys
file = open(".lock", "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print()
select.select([sys.stdin], [], [], float(sys.argv[1]))
"""


@pytest.mark.parametrize(("lock_s", "held_s", "first"), [(30.0, 0.5, False), (0.2, 300.0, True)])
@on_ranks(1)
def test_two_programs_save_in_turn_but_wait_for_no_lost_node(
    tmp_path: Path, lock_s: float, held_s: float, first: bool
) -> None:
    run = Run(Settings(1, 1))
    command = [sys.executable, "-uc", HOLDS, str(held_s)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        with mock.patch.object(saving, "_LOCK_S", lock_s):
            run.save(tmp_path)
        assert (other.poll() is None) == first
    assert (tmp_path / "state.pt").exists()


@on_ranks(2)
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run, file = Run(), tmp_path / "file"
    if run.topology.rank == 0:
        file.write_text("in the way")
    dist.barrier()
    for place in (file, file / "below"):
        named = rf"^directory = {place}: cannot be written: rank 0: \[Errno"
        with pytest.raises(RuntimeError, match=named):
            run.save(place)
    assert [*tmp_path.iterdir()] == [file]


class Wrapper(torch.optim.Optimizer):
    """Holds the optimizer that does the work, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


class Main(torch.optim.AdamW):
    """A class that is named like one of the script that was started."""


Main.__module__ = "__main__"


@on_ranks(2)
def test_an_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path)
    params = list(run.model.parameters())
    before = run.params()
    for other, kind in (
        (torch.optim.SGD(params, lr=0.3), "sgd.SGD"),
        (Wrapper(torch.optim.SGD(params, lr=0.3)), "sgd.SGD"),
        (torch.optim.Adam(params, lr=0.3), "adam.Adam"),
    ):
        message = errors_of(fcdp.load, run.model, other, tmp_path)
        assert message == (
            "ValueError: optimizer: the checkpoint has the state of one of class "
            f"torch.optim.adamw.AdamW; must be torch.optim.{kind}, as the one to load into"
        ), message
        assert not other.state
        assert other.param_groups[0]["lr"] == 0.3
    assert_equal(run.params(), before)
    for same in (torch.optim.AdamW(params, fused=True), Wrapper(torch.optim.AdamW(params))):
        fcdp.load(run.model, same, tmp_path)
        assert len(same.state) == len(params)
    fcdp.save(run.model, Main(params), tmp_path)
    main = type("Main", (torch.optim.AdamW,), {})  # the same class, imported by another script
    fcdp.load(run.model, main(params), tmp_path)


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run = Run()
    model, first = run.model, run.topology.rank == 0

    def refused(words: str, call: Callable[..., object], *args: object, **options: object) -> None:
        assert words in errors_of(call, *args, **options)

    before = run.params()
    refused("missing: holds no complete checkpoint", run.load, tmp_path / "missing")
    run.save(tmp_path)
    other = Run(replace(PLAIN, adapter_rank=3))
    refused("lacks blocks.0.first.down.weight", other.load, tmp_path)
    wider = make_model(PLAIN)
    wider.blocks[1].up = nn.Linear(WIDTH, 14)
    wider.blocks[1].down = nn.Linear(14, WIDTH)
    shard_with_fcdp(wider, run.topology, PLAIN)
    shapes = "blocks.1.up.weight: has shape (13, 12) in the checkpoint; must be (14, 12)"
    refused(shapes, fcdp.load, wider, make_optimizer(wider), tmp_path)
    grouped = torch.optim.AdamW([{"params": list(block.parameters())} for block in model.blocks])
    refused("has 1 parameter groups; must be 2", fcdp.load, model, grouped, tmp_path)
    fewer = torch.optim.AdamW(model.blocks.parameters())
    besides = "has embedding.weight, norm.bias, norm.weight besides"
    refused(besides, fcdp.load, model, fewer, tmp_path)
    foreign = torch.optim.AdamW(make_model(PLAIN).parameters())
    refused("not the model's", fcdp.save, model, foreign, tmp_path)
    extra, of_rank_0 = (make_model, "extra") if first else (None, "rank 0: extra")
    refused(of_rank_0, fcdp.save, model, run.optimizer, tmp_path, extra=extra)
    odd = make_optimizer(model)
    odd.state[next(model.parameters())] = {"rows": torch.zeros(5)}
    refused("state 'rows' of embedding.weight", fcdp.save, model, odd, tmp_path)
    assert_equal(run.params(), before)
    if first:
        next(tmp_path.glob("shards-*/__1_0.distcp")).unlink()
    refused("__1_0.distcp: is missing", run.load, tmp_path)


# --- Kills


def count_changes(directory: Path) -> int:
    """Steps of a save over another one."""
    run = trained(directory)
    steps: list[None] = []
    on_each_change(directory, lambda: steps.append(None))
    run.save(directory)
    return len(steps)


def step_and_save(directory: Path, rank: int, killed_at: int) -> None:
    """Take up the run, go one step further and save; one rank kills itself before that is over."""
    run = Run(seed=1)
    run.load(directory)
    run.train(1)
    if run.topology.rank == rank:
        kill_at(directory, killed_at)
    run.save(directory)


def parameters_by_step(directory: Path, steps: int) -> list[dict[str, torch.Tensor]]:
    """Train a run that nothing disturbs; its start is saved."""
    run = Run()
    run.save(directory)
    history = [run.params()]
    for _ in range(steps):
        run.train(1)
        history.append(run.params())
    return history


def load(directory: Path) -> tuple[int, dict[str, torch.Tensor]]:
    run = Run(seed=2)
    run.load(directory)
    return run.position, run.params()


def test_kills_leave_the_old_checkpoint_or_the_new(
    ranks: Pools, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path / "run"
    exhaustive = request.config.getoption("--exhaustive")
    counting = RankPool(2)
    counts = counting.run(count_changes, tmp_path / "counted")
    counting.close()
    # Ten all over the shards, on both ranks, and the last ten: description, commit, removal.
    chosen = [(i % 2, 1 + i * counts[i % 2] // 10) for i in range(10)]
    chosen += [(0, counts[0] - left) for left in reversed(range(10))]
    if not exhaustive:
        chosen = chosen[5::7]
    expected = ranks.run(2, parameters_by_step, directory, len(chosen))[0]
    position = 0
    outcomes = []
    for rank, step in chosen:
        pool = RankPool(2)
        with pytest.raises(RankFailure, match="its process has ended"):
            pool.run(step_and_save, directory, rank, step)
        pool.close()
        resumed, params = ranks.run(2, load, directory)[0]
        assert resumed in (position, position + 1), (rank, step)
        assert_equal(params, expected[resumed])
        outcomes.append(resumed - position)
        position = resumed
    assert set(outcomes) == {0, 1}, list(zip(chosen, outcomes, strict=True))

"""A save that fails harms no checkpoint; what does not fit is refused on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import fcdp
from fcdp.checkpoint import saving
from tests.disks import full_disk
from tests.fcdp.checkpoints import PLAIN, Run, assert_equal, errors_of
from tests.fcdp.training import WIDTH, Settings, make_model, make_optimizer, shard_with_fcdp
from tests.ranks import Pools


def fail_on_one_rank(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def fail_to_save(directory: Path, step: str, asynchronous: bool) -> str:
    """A good save and a bad one over it. Returns the error."""
    run = Run()
    run.train(1)
    run.save(directory)
    expected = run.train(2)
    with pytest.MonkeyPatch.context() as patch:
        if step == "commit":
            patch.setattr(os, "replace", fail_on_one_rank)
        elif run.topology.rank == 1:
            patch.setattr(FileSystemWriter, step, fail_on_one_rank)
        with pytest.raises(RuntimeError) as error:
            run.save(directory, asynchronous=asynchronous).result()
    resumed = Run(seed=1)
    resumed.load(directory)
    assert resumed.train(2) == expected
    return str(error.value)


@pytest.mark.parametrize(
    ("step", "asynchronous"),
    [("prepare_local_plan", False), ("write_data", True), ("commit", False), ("commit", True)],
)
def test_a_failed_save_leaves_the_checkpoint_before_it(
    ranks: Pools, tmp_path: Path, step: str, asynchronous: bool
) -> None:
    (tmp_path / "notes").write_text("the user's")
    for message in ranks.run(2, fail_to_save, tmp_path, step, asynchronous):
        assert "cannot be written: rank" in message
        assert "No space left" in message
    assert len(list(tmp_path.glob("shards-*"))) == 1
    assert (tmp_path / "notes").exists()


def save_on_a_full_disk(directory: Path, part: str) -> str:
    """A good save and one over it that the disk has no room for. Returns the error."""
    run = Run()
    run.train(1)
    run.save(directory)
    expected = run.train(2)
    biggest = max(path.stat().st_size for path in directory.glob("shards-*/*"))
    full, extra = {
        # Of one rank's shards half finds room; of state.pt all but what the user adds to it.
        "shards": (run.topology.rank == 1, None),
        "state.pt": (True, torch.zeros(biggest)),
    }[part]
    size = biggest // 2 if part == "shards" else biggest
    with full_disk(size) if full else nullcontext(), pytest.raises(RuntimeError) as error:
        fcdp.save(run.model, run.optimizer, directory, extra=extra)
    resumed = Run(seed=1)
    resumed.load(directory)
    assert resumed.train(2) == expected
    assert len(list(directory.glob("shards-*"))) == 1
    return str(error.value)


@pytest.mark.parametrize("part", ["shards", "state.pt"])
def test_a_full_disk_leaves_the_checkpoint_before_it(
    ranks: Pools, tmp_path: Path, part: str
) -> None:
    culprit, name = {"shards": (1, "__1_0.distcp"), "state.pt": (0, "state.pt")}[part]
    for message in ranks.run(2, save_on_a_full_disk, tmp_path, part):
        assert f"directory = {tmp_path}: cannot be written: rank {culprit}: " in message
        assert "File too large" in message
        assert name in message


def save_where_nothing_can_be(directory: Path) -> dict[str, str]:
    run = Run()
    places = {"file": directory / "file", "below a file": directory / "file" / "below"}
    return {case: errors_of(run.save, place) for case, place in places.items()}


def save_where_others_do_not_look(directory: Path) -> str:
    """A save, by each rank into a folder of its own. Returns the error."""
    run = Run()
    with pytest.raises(RuntimeError) as error:
        run.save(directory / f"node{run.topology.rank}")
    return str(error.value)


def test_nodes_without_a_common_folder_hear_of_it_at_the_first_save(
    ranks: Pools, tmp_path: Path
) -> None:
    """Not from the load that could not find the others' files, when the run is lost."""
    for message in ranks.run(2, save_where_others_do_not_look, tmp_path):
        assert "is not there for rank 0; must be on a file system that all nodes share" in message
    assert not (tmp_path / "node0/state.pt").exists()


#: Another program, between its commit and tidying up.
HOLDS = (
    "import fcntl, time; file = open('.lock', 'w'); fcntl.lockf(file, 2); print(); time.sleep(3)"
)


def saves_before_another_program(directory: Path, lock_s: float) -> bool:
    run = Run(Settings(1, 1))
    with subprocess.Popen([sys.executable, "-uc", HOLDS], cwd=directory, stdout=-1) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        with mock.patch.object(saving, "_LOCK_S", lock_s):
            run.save(directory)
        return other.poll() is None


@pytest.mark.parametrize(("lock_s", "first"), [(30.0, False), (0.2, True)])
def test_two_programs_save_in_turn_but_wait_for_no_lost_node(
    ranks: Pools, tmp_path: Path, lock_s: float, first: bool
) -> None:
    assert ranks.run(1, saves_before_another_program, tmp_path, lock_s) == [first]
    assert (tmp_path / "state.pt").exists()


def test_a_directory_that_cannot_be_written_is_named(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for messages in ranks.run(2, save_where_nothing_can_be, tmp_path):
        for message in messages.values():
            assert message.startswith(f"RuntimeError: directory = {tmp_path}/file")
            assert "cannot be written: rank 0: [Errno" in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
    """As a class of the script that was started is named."""


Main.__module__ = "__main__"


def load_into_another_class(directory: Path) -> dict[str, str]:
    run = Run()
    run.train(1)
    run.save(directory)
    run.train(1)
    params = list(run.model.parameters())
    before = run.params()
    messages = {}
    for case, other in {
        "sgd": torch.optim.SGD(params, lr=0.3),
        "wrapped": Wrapper(torch.optim.SGD(params, lr=0.3)),
        "adam": torch.optim.Adam(params, lr=0.3),
    }.items():
        messages[case] = errors_of(fcdp.load, run.model, other, directory)
        assert not other.state
        assert other.param_groups[0]["lr"] == 0.3
    assert_equal(run.params(), before)
    for same in (torch.optim.AdamW(params, fused=True), Wrapper(torch.optim.AdamW(params))):
        fcdp.load(run.model, same, directory)
        assert len(same.state) == len(params)
    fcdp.save(run.model, Main(params), directory)
    main = type("Main", (torch.optim.AdamW,), {})  # the same class, imported by another script
    fcdp.load(run.model, main(params), directory)
    return messages


def test_an_optimizer_of_another_class_is_refused(ranks: Pools, tmp_path: Path) -> None:
    for messages in ranks.run(2, load_into_another_class, tmp_path):
        for case, kind in {
            "sgd": "torch.optim.sgd.SGD",
            "wrapped": "torch.optim.sgd.SGD",
            "adam": "torch.optim.adam.Adam",
        }.items():
            assert messages[case] == (
                "ValueError: optimizer: the checkpoint has the state of one of class "
                f"torch.optim.adamw.AdamW; must be {kind}, as the one to load into"
            )


def refusals(directory: Path) -> dict[str, str]:
    run = Run()
    before = run.params()
    messages = {"missing": errors_of(run.load, directory / "missing")}
    run.save(directory)
    other = Run(replace(PLAIN, adapter_rank=3))
    messages["keys"] = errors_of(other.load, directory)
    wider = make_model(PLAIN)
    wider.blocks[1].up = nn.Linear(WIDTH, 14)
    wider.blocks[1].down = nn.Linear(14, WIDTH)
    shard_with_fcdp(wider, run.topology, PLAIN)
    messages["shapes"] = errors_of(fcdp.load, wider, make_optimizer(wider, PLAIN), directory)
    grouped = torch.optim.AdamW(
        [{"params": list(block.parameters())} for block in run.model.blocks]
    )
    messages["groups"] = errors_of(fcdp.load, run.model, grouped, directory)
    fewer = torch.optim.AdamW(run.model.blocks.parameters())
    messages["params"] = errors_of(fcdp.load, run.model, fewer, directory)
    foreign = torch.optim.AdamW(make_model(PLAIN).parameters())
    messages["foreign"] = errors_of(fcdp.save, run.model, foreign, directory)
    extra = make_model if run.topology.rank == 0 else None
    messages["extra"] = errors_of(fcdp.save, run.model, run.optimizer, directory, extra=extra)
    odd = make_optimizer(run.model, PLAIN)
    odd.state[next(run.model.parameters())] = {"rows": torch.zeros(5)}
    messages["odd"] = errors_of(fcdp.save, run.model, odd, directory)
    assert_equal(run.params(), before)
    if run.topology.rank == 0:
        next(directory.glob("shards-*/__1_0.distcp")).unlink()
    messages["unreadable"] = errors_of(run.load, directory)
    return messages


def test_what_does_not_fit_is_refused_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks.run(2, refusals, tmp_path)
    for case, words in {
        "missing": "missing: holds no complete checkpoint",
        "keys": "lacks blocks.0.first.down.weight",
        "shapes": "blocks.1.up.weight: has shape (13, 12) in the checkpoint; must be (14, 12)",
        "groups": "has 1 parameter groups; must be 2",
        "params": "has embedding.weight, norm.bias, norm.weight besides",
        "foreign": "not the model's",
        "extra": "extra",
        "odd": "state 'rows' of embedding.weight",
        "unreadable": "__1_0.distcp: is missing",
    }.items():
        assert words in first[case], (case, first[case])
        if case == "extra":
            assert "rank 0: extra" in second[case]
        else:
            assert words in second[case], (case, second[case])

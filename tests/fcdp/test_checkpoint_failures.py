"""A save that fails harms no checkpoint; what does not fit is refused on every rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import fcdp
from tests.fcdp.checkpoints import PLAIN, Run, assert_equal, errors_of
from tests.fcdp.training import WIDTH, make_model, make_optimizer, shard_with_fcdp
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


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("step", ["prepare_local_plan", "write_data", "commit"])
def test_a_failed_save_leaves_the_checkpoint_before_it(
    ranks: Pools, tmp_path: Path, step: str, asynchronous: bool
) -> None:
    (tmp_path / "notes").write_text("the user's")
    for message in ranks.run(2, fail_to_save, tmp_path, step, asynchronous):
        assert "cannot be written: rank" in message
        assert "No space left" in message
    assert len(list(tmp_path.glob("shards-*"))) == 1
    assert (tmp_path / "notes").exists()


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
            assert "another rank" in second[case]
        else:
            assert words in second[case], (case, second[case])

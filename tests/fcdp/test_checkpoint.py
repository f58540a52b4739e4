"""A checkpoint brings back the same run, anywhere, and does not hold up the one that goes on."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import fcdp
from tests.fcdp.checkpoints import PLAIN, Run, assert_equal, moments
from tests.fcdp.training import Settings
from tests.ranks import Pools


def resume(settings: Settings, directory: Path, before: int) -> tuple[list[float], list[float]]:
    """Losses after a save, of the run that went on and of one that started from it."""
    run = Run(settings)
    run.train(before)
    run.save(directory)
    expected = run.train(3)
    resumed = Run(settings, seed=1)
    resumed.load(directory)
    return resumed.train(3), expected


RUNS = {"full": Settings(2, 2), "small_adapters": Settings(2, 2, adapter_rank=1)}


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_has_the_same_losses(ranks: Pools, tmp_path: Path, run: str) -> None:
    for resumed, expected in ranks.run(4, resume, RUNS[run], tmp_path, 3):
        assert resumed == expected
        assert len(set(expected)) == 3


def test_a_run_saved_before_its_first_step_resumes_too(ranks: Pools, tmp_path: Path) -> None:
    """A state that PyTorch makes up for an optimizer without one would count a step."""
    resumed, expected = ranks.run(2, resume, PLAIN, tmp_path, 0)[0]
    assert resumed == expected
    assert expected == ranks.run(2, losses_without_saving)[0]


def losses_without_saving() -> list[float]:
    return Run().train(3)


def save_trained(settings: Settings, directory: Path) -> dict[str, torch.Tensor]:
    run = Run(settings)
    run.train(2)
    run.save(directory)
    return {**run.params(), **moments(run)}


def load_elsewhere(settings: Settings, directory: Path) -> dict[str, torch.Tensor]:
    run = Run(settings, seed=1)
    run.load(directory)
    assert run.position == 2
    return {**run.params(), **moments(run)}


@pytest.mark.parametrize("adapter_rank", [0, 3], ids=["full", "adapters"])
def test_other_topologies_load_the_same_values(
    ranks: Pools, tmp_path: Path, adapter_rank: int
) -> None:
    settings = Settings(2, 2, adapter_rank=adapter_rank)
    saved = ranks.run(4, save_trained, settings, tmp_path)[0]
    for nodes, ranks_per_node in [(1, 2), (3, 1)]:
        there = replace(settings, nodes=nodes, ranks_per_node=ranks_per_node)
        for loaded in ranks.run(there.world_size, load_elsewhere, there, tmp_path):
            assert_equal(loaded, saved)


# --- Saving while training goes on


class Gate(FileSystemWriter):
    """Holds back all writing until it is opened."""

    opened = threading.Event()
    write = FileSystemWriter.write_data

    def write_data(self, *args: Any) -> Any:
        assert Gate.opened.wait(60)
        return Gate.write(self, *args)


def train_during_saves(directory: Path) -> tuple[bool, list[float]]:
    run = Run()
    run.train(2)
    Gate.opened.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", Gate.write_data)
        first = run.save(directory, asynchronous=True)
        run.train(3)
        second = run.save(directory, asynchronous=True)
        losses = run.train(2)
        waited = not first.done() and not second.done() and not (directory / "state.pt").exists()
        Gate.opened.set()
        first.result()
        second.result()
    return waited, losses


def resume_at(position: int, directory: Path) -> list[float]:
    run = Run(seed=1)
    run.load(directory)
    assert run.position == position
    return run.train(2)


def test_training_goes_on_while_a_checkpoint_is_written(ranks: Pools, tmp_path: Path) -> None:
    answers = ranks.run(2, train_during_saves, tmp_path)
    assert all(waited for waited, _ in answers)
    assert ranks.run(2, resume_at, 5, tmp_path) == [losses for _, losses in answers]
    assert len(list(tmp_path.glob("shards-*"))) == 1


def save_and_load_at_once(directory: Path) -> tuple[int, int]:
    run = Run()
    first = run.save(directory, asynchronous=True)
    other = Run(seed=1)
    other.load(directory)
    assert first.done()
    assert_equal(other.params(), run.params())
    run.train(1)
    run.save(directory, asynchronous=True)
    run.train(1)
    run.save(directory)
    other.load(directory)
    assert_equal(other.params(), run.params())
    return other.position, len(list(directory.glob("shards-*")))


def test_what_follows_a_save_under_way_waits_for_it(ranks: Pools, tmp_path: Path) -> None:
    assert ranks.run(2, save_and_load_at_once, tmp_path) == [(2, 1), (2, 1)]


def save_beside_random_numbers(directory: Path) -> bool:
    run = Run()
    torch.manual_seed(3)
    random.seed(3)
    run.save(directory)
    drawn = torch.rand(1).item(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    return drawn == (torch.rand(1).item(), random.random())


def test_a_save_draws_no_random_numbers_of_the_user(ranks: Pools, tmp_path: Path) -> None:
    assert all(ranks.run(2, save_beside_random_numbers, tmp_path))


def pass_extra(directory: Path) -> Any:
    run = Run()
    extra = {"rng": torch.get_rng_state(), "names": ["a", None], "rank": run.topology.rank}
    fcdp.save(run.model, run.optimizer, directory, extra=extra)
    loaded = fcdp.load(run.model, run.optimizer, directory)
    assert torch.equal(loaded.pop("rng"), extra["rng"])
    return loaded


def test_extra_is_that_of_rank_0(ranks: Pools, tmp_path: Path) -> None:
    expected = {"names": ["a", None], "rank": 0}
    assert ranks.run(2, pass_extra, tmp_path) == [expected, expected]

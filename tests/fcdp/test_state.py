"""A checkpoint brings back the same run, anywhere; a save that fails harms none."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import fcdp
from tests.fcdp.training import (
    WIDTH,
    Settings,
    batches,
    loss_of,
    make_model,
    make_optimizer,
    shard_with_fcdp,
    topology_of,
)
from tests.ranks import Pools

PLAIN = Settings(2, 1)


class Run:
    """A training run on this rank."""

    def __init__(self, settings: Settings = PLAIN, seed: int = 0) -> None:
        self.topology = topology_of(settings.nodes, settings.ranks_per_node)
        model = make_model(settings)
        torch.manual_seed(seed)
        for param in model.parameters():
            if seed:
                nn.init.normal_(param)
        self.model = shard_with_fcdp(model, self.topology, settings)
        self.optimizer = make_optimizer(self.model, settings)
        self.data = batches(settings, self.topology.rank)
        self.position = 0

    def train(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        loss = loss_of(self.model, next(self.data))
        self.position += 1
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, directory: Path, **options: Any) -> Any:
        extra = {"position": self.position}
        return fcdp.save(self.model, self.optimizer, directory, extra=extra, **options)

    def load(self, directory: Path) -> None:
        extra = fcdp.load(self.model, self.optimizer, directory)
        while self.position < extra["position"]:
            next(self.data)
            self.position += 1

    def params(self) -> dict[str, torch.Tensor]:
        return {
            name: param.full_tensor().detach().clone()
            for name, param in self.model.named_parameters()
        }


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# --- Resuming


def resume(settings: Settings, directory: Path, before: int) -> tuple[list[float], list[float]]:
    """Losses after a save, of the run that went on and of one that started from it."""
    run = Run(settings)
    run.train(before)
    run.save(directory)
    expected = run.train(3)
    resumed = Run(settings, seed=1)
    resumed.load(directory)
    return resumed.train(3), expected


RUNS = {
    "full": Settings(2, 2),
    "adapters": Settings(2, 2, adapter_rank=3),
    "small_adapters": Settings(2, 2, adapter_rank=1),
    "fused": Settings(2, 2, optimizer="fused"),
    "sgd": Settings(2, 2, optimizer="sgd"),
    "kept_after_forward": Settings(2, 2, reshard_after_forward=False),
}


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


def resume_with_parts_unused(directory: Path) -> tuple[list[float], list[float]]:
    """The optimizer has no state for what never had a gradient; the rate has changed."""
    run = Run()
    for param in run.model.blocks[0].parameters():
        param.requires_grad_(False)
    run.train(2)
    run.optimizer.param_groups[0]["lr"] = 0.01
    run.save(directory)
    resumed = Run(seed=1)
    resumed.load(directory)
    for param in resumed.model.blocks[0].parameters():
        param.requires_grad_(False)
    return resumed.train(2), run.train(2)


def test_a_partial_optimizer_state_and_its_rates_come_back(ranks: Pools, tmp_path: Path) -> None:
    resumed, expected = ranks.run(2, resume_with_parts_unused, tmp_path)[0]
    assert resumed == expected


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


def moments(run: Run) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.full_tensor() if key != "step" else value
        for name, param in run.model.named_parameters()
        for key, value in run.optimizer.state[param].items()
    }


@pytest.mark.parametrize("adapter_rank", [0, 3], ids=["full", "adapters"])
def test_other_topologies_load_the_same_values(
    ranks: Pools, tmp_path: Path, adapter_rank: int
) -> None:
    settings = Settings(2, 2, adapter_rank=adapter_rank)
    saved = ranks.run(4, save_trained, settings, tmp_path)[0]
    for nodes, ranks_per_node in [(2, 1), (1, 2), (3, 1)]:
        there = replace(settings, nodes=nodes, ranks_per_node=ranks_per_node)
        for loaded in ranks.run(there.world_size, load_elsewhere, there, tmp_path):
            assert_equal(loaded, saved)


def load_in_mid_run(settings: Settings, directory: Path) -> tuple[list[float], list[float], bool]:
    run = Run(settings)
    run.train(1)
    run.save(directory)
    fresh = Run(settings)
    fresh.load(directory)
    expected = fresh.train(2)
    # The frozen units' entries last for the whole run, the others' until the next step.
    used = Run(settings, seed=1)
    used.train(2)
    with torch.no_grad():
        loss_of(used.model, next(batches(settings, 0)))
    filled = fcdp.ledger(used.model).hits > 0
    used.data, used.position = batches(settings, used.topology.rank), 0
    used.load(directory)
    return used.train(2), expected, filled


@pytest.mark.parametrize("adapter_rank", [0, 3], ids=["full", "adapters"])
def test_a_load_makes_the_cache_stale(ranks: Pools, tmp_path: Path, adapter_rank: int) -> None:
    settings = Settings(2, 2, adapter_rank=adapter_rank)
    for actual, expected, filled in ranks.run(4, load_in_mid_run, settings, tmp_path):
        assert filled
        assert actual == expected


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


def save_and_train_on(directory: Path) -> list[float]:
    run = Run()
    run.train(2)
    saving = run.save(directory, asynchronous=True)
    losses = run.train(2)
    saving.result()
    return losses


def test_an_asynchronous_save_holds_the_values_of_the_call(ranks: Pools, tmp_path: Path) -> None:
    expected = ranks.run(2, save_and_train_on, tmp_path)
    assert ranks.run(2, resume_at, 2, tmp_path) == expected


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


# --- Failing


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


def errors_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        call(*args, **options)
    return f"{type(error.value).__name__}: {error.value}"


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

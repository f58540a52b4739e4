"""A checkpoint brings back the same run, anywhere, and does not hold up the one that goes on."""

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fcdp
from fcdp.checkpoint.saving import Background
from tests.fcdp import training
from tests.fcdp.checkpoints import PLAIN, Run, assert_equal, contents
from tests.fcdp.training import Settings, batches, loss_of, take_step
from tests.ranks import Pools, on_ranks


@pytest.mark.parametrize(("adapter_rank", "before"), [(0, 3), (1, 3), (0, 0)])
@on_ranks(4)
def test_a_resumed_run_has_the_same_losses(tmp_path: Path, adapter_rank: int, before: int) -> None:
    """Before its first step a state that PyTorch makes up for an optimizer would count one."""
    settings = Settings(2, 2, adapter_rank=adapter_rank)
    plain = Run(settings).train(before + 3)
    run, resumed = Run(settings), Run(settings, seed=1)
    resumed.step()  # a state that is another, and goes
    resumed.data = batches(settings, resumed.topology.rank)
    losses = run.train(before)
    run.save(tmp_path)
    assert bool(run.optimizer.state) == bool(before)
    resumed.load(tmp_path)
    assert resumed.train(3) == plain[before:]
    assert losses + run.train(3) == plain
    assert len(set(plain)) == before + 3


def save_trained(settings: Settings, directory: Path) -> dict[str, torch.Tensor]:
    run = Run(settings)
    run.train(2)
    run.save(directory)
    return contents(run)


def load_elsewhere(settings: Settings, directory: Path) -> dict[str, torch.Tensor]:
    run = Run(settings, seed=1)
    run.load(directory)
    assert run.position == 2
    return contents(run)


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


@on_ranks(4)
def test_ranks_of_the_world_that_train_nothing_need_not_call(tmp_path: Path) -> None:
    """Neither a save, nor a load; those that train are not the first ranks of the world."""
    mesh = DeviceMesh("cpu", [1, 2])
    if mesh.get_coordinate() is None:
        return
    topology = fcdp.Topology.of_mesh(mesh, ranks_per_node=1)
    model = fcdp.shard(nn.Linear(4, 4), topology, units=[])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = {name: param.clone() for name, param in training.params_of(model).items()}
    fcdp.save(model, optimizer, tmp_path, extra={"step": 1})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert fcdp.load(model, optimizer, tmp_path) == {"step": 1}
    assert_equal(training.params_of(model), saved)


# --- Saving while training goes on


class Gate(FileSystemWriter):
    """Holds back all writing until it is opened."""

    opened = threading.Event()
    write = FileSystemWriter.write_data

    def write_data(self, *args: Any) -> Any:
        assert Gate.opened.wait(60)
        return Gate.write(self, *args)

    @classmethod
    @contextlib.contextmanager
    def closed(cls) -> Iterator[pytest.MonkeyPatch]:
        """Close it in the body; left closed, it would hold the tests that follow for a minute."""
        cls.opened.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileSystemWriter, "write_data", cls.write_data)
            try:
                yield patch
            finally:
                cls.opened.set()


@on_ranks(2)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run = Run()
    run.train(2)
    with Gate.closed():
        first = run.save(tmp_path, asynchronous=True)
        run.train(3)
        second = run.save(tmp_path, asynchronous=True)
        losses = run.train(2)
        early = first.done() or second.done() or (tmp_path / "state.pt").exists()
        Gate.opened.set()
        first.result()
        second.result()
    assert not early
    resumed = Run(seed=1)
    resumed.load(tmp_path)
    assert resumed.position == 5
    assert resumed.train(2) == losses
    assert len(list(tmp_path.glob("shards-*"))) == 1


@on_ranks(2)
def test_a_load_waits_for_the_save_under_way(tmp_path: Path) -> None:
    run = Run()
    saved = run.params()
    settle = Background.settle

    def open_and_settle(background: Background) -> None:
        Gate.opened.set()  # nothing else would end the save
        settle(background)

    with Gate.closed() as patch:
        patch.setattr(Background, "settle", open_and_settle)
        run.save(tmp_path, asynchronous=True)
        run.train(1)
        run.load(tmp_path)
    assert_equal(run.params(), saved)


@on_ranks(2)
def test_a_writer_that_completes_a_copy_of_the_metadata_will_do(tmp_path: Path) -> None:
    """PyTorch 2.11's leaves what it is given as it is."""
    run, finish = Run(), FileSystemWriter.finish
    with pytest.MonkeyPatch.context() as patch:
        copied: Any = lambda self, metadata, results: finish(self, replace(metadata), results)  # noqa: E731
        patch.setattr(FileSystemWriter, "finish", copied)
        run.save(tmp_path)
    run.load(tmp_path)


@on_ranks(2)
def test_what_follows_a_save_under_way_waits_for_it(tmp_path: Path) -> None:
    run = Run()
    first = run.save(tmp_path, asynchronous=True)
    other = Run(seed=1)
    other.load(tmp_path)
    assert first.done()
    assert_equal(other.params(), run.params())
    run.train(1)
    run.save(tmp_path, asynchronous=True)
    run.train(1)
    run.save(tmp_path)
    other.load(tmp_path)
    assert_equal(other.params(), run.params())
    assert other.position == 2
    assert len(list(tmp_path.glob("shards-*"))) == 1


@on_ranks(2)
def test_a_save_draws_no_random_numbers_of_the_user(tmp_path: Path) -> None:
    run, drawn = Run(), set()
    for saves in (True, False):
        torch.manual_seed(3)
        random.seed(3)
        if saves:
            run.save(tmp_path)
        drawn.add((torch.rand(1).item(), random.random()))
    assert len(drawn) == 1


@on_ranks(2)
def test_extra_is_that_of_rank_0(tmp_path: Path) -> None:
    run = Run()
    extra = {"rng": torch.get_rng_state(), "names": ["a", None], "rank": run.topology.rank}
    fcdp.save(run.model, run.optimizer, tmp_path, extra=extra)
    loaded = fcdp.load(run.model, run.optimizer, tmp_path)
    assert torch.equal(loaded.pop("rng"), extra["rng"])
    assert loaded == {"names": ["a", None], "rank": 0}


def steps_beside_saving(engine: str, path: Path, helpers: bool) -> list[float]:
    """Two steps, a save by PyTorch beside two more, then the saved state and those two again.

    The state is got by PyTorch's helpers, or by hand, as small scripts do.
    """
    run = training.Run(PLAIN, engine)
    model, optimizer = run.model, run.optimizer
    if not helpers:  # by hand the model's state alone is saved: an optimizer that has none
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = next(run.data), next(run.data)

    def steps() -> list[float]:
        return [take_step(loss_of(model, batch), optimizer) for batch in (first, second)]

    def state() -> Any:
        if helpers:
            return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        return {"model": model.state_dict()}

    steps()
    group = dist.new_group(backend="gloo")  # the saving thread must not meet FSDP2's collectives
    saving = dcp.async_save(state(), checkpoint_id=path, process_group=group)
    losses = steps()
    saving.result()
    saved = state()
    dcp.load(saved, checkpoint_id=path)
    if helpers:
        state_dicts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
        set_state_dict(model, optimizer, **state_dicts)
    else:
        model.load_state_dict(saved["model"])
    assert steps() == losses
    return losses


@pytest.mark.parametrize("helpers", [True, False], ids=["helpers", "by hand"])
@on_ranks(2)
def test_steps_beside_an_asynchronous_save_by_pytorch(tmp_path: Path, helpers: bool) -> None:
    plain, cached = (
        steps_beside_saving(engine, tmp_path / engine, helpers) for engine in ("fsdp2", "fcdp")
    )
    assert cached == plain
    assert len({*plain}) == 2

"""A training goes on from a checkpoint, of its own strategy or of another, as if without."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baselines.registry import STRATEGIES, find
from baselines.settings import CacheSettings, PipelineSettings, Settings
from fcdp.checkpoint.loading import load_held
from fcdp.checkpoint.saving import save_held
from tests.baselines import training
from tests.baselines.pipeline.training import whole
from tests.baselines.training import Run, Tuning
from tests.ranks import Pools

GROUPS = {"within_stage": "fcdp", "nodes_per_stage": 2}
#: Steps before a checkpoint, and after it.
BEFORE, AFTER = 2, 2


def saved(run: Run, strategy: str, settings: Settings, directory: Path | None) -> list[float]:
    """All losses of a training, which writes a checkpoint in between, unless it has no folder."""
    trainable, batches = run.made(strategy, settings)
    data = iter(batches)
    losses = [training.step(trainable, data) for _ in range(BEFORE)]
    if directory is not None:
        save_held(trainable.held(), directory, extra={"steps": BEFORE})
    return losses + [training.step(trainable, data) for _ in range(AFTER)]


def gone_on(run: Run, strategy: str, settings: Settings, directory: Path) -> list[float]:
    """Losses after the checkpoint, of a training that was somewhere else before it read it."""
    trainable, batches = run.made(strategy, settings)
    data = iter(batches)
    training.step(trainable, iter(training.batches_of(run.world_size)))
    extra = load_held(trainable.held(), directory)
    for _ in range(extra["steps"] * run.accumulation):
        next(data)
    return [training.step(trainable, data) for _ in range(AFTER)]


@pytest.mark.parametrize(("run", "settings"), training.runs(__file__), ids=str)
def test_a_pipeline_that_goes_on_has_the_same_losses(
    ranks: Pools, tmp_path: Path, run: Run, settings: dict[str, Any]
) -> None:
    """Embeddings are tied in GPT-2, where two stages have one name."""
    check(ranks, tmp_path, run, "pipeline", PipelineSettings(**settings))


#: FSDP2's; those over FCDP's cache are saved as ``fcdp`` is.
SHARDED = [each.name for each in STRATEGIES if each.engine == "fsdp2"]


@pytest.mark.parametrize("strategy", [*SHARDED, "fcdp"])
def test_what_is_sharded_over_all_ranks_goes_on_alike(
    ranks: Pools, tmp_path: Path, strategy: str
) -> None:
    check(ranks, tmp_path, Run(2, 2, 2, "gpt2", "lora"), strategy, find(strategy).settings())


def check(ranks: Pools, folder: Path, run: Run, strategy: str, settings: Settings) -> None:
    """Losses after a checkpoint are those of the training that has written it, to the bit."""
    own = run, strategy, settings
    written = ranks.run(run.world_size, saved, *own, folder)
    resumed = ranks.run(run.world_size, gone_on, *own, folder)
    assert resumed == [losses[BEFORE:] for losses in written]


#: Strategies that write and read, with nodes, ranks per node and settings.
WAYS: dict[str, tuple[str, int, int, Settings]] = {
    "pipeline": ("pipeline", 2, 2, PipelineSettings()),
    "groups": ("pipeline", 4, 1, PipelineSettings(**GROUPS)),
    "fcdp": ("fcdp", 2, 2, CacheSettings()),
    "fsdp2": ("fsdp2", 2, 2, Settings()),
    "fsdp2-hsdp": ("fsdp2-hsdp", 2, 2, Settings()),
}


def run_of(way: str, tuning: Tuning) -> tuple[Run, str, Settings]:
    strategy, nodes, ranks_per_node, settings = WAYS[way]
    return Run(nodes, ranks_per_node, 1, "gpt2", tuning), strategy, settings


@functools.cache
def written(ranks: Pools, folder: Path, way: str, tuning: Tuning) -> np.ndarray:
    """Mean losses of a training that has written ``folder``."""
    return np.mean(ranks.run(4, saved, *run_of(way, tuning), folder / way / tuning), axis=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("way", ["pipeline", "fcdp"])
def test_a_save_changes_nothing(ranks: Pools, folder: Path, way: str) -> None:
    undisturbed = ranks.run(4, saved, *run_of(way, "full"), None)
    assert (np.mean(undisturbed, axis=0) == written(ranks, folder, way, "full")).all()


@pytest.mark.parametrize(
    ("writer", "reader", "tuning"),
    [
        ("pipeline", "fcdp", "full"),
        ("pipeline", "fsdp2", "full"),
        ("fcdp", "pipeline", "full"),
        ("fsdp2", "groups", "full"),
        ("groups", "pipeline", "full"),
        ("groups", "fsdp2-hsdp", "full"),
        ("fsdp2-hsdp", "pipeline", "full"),
        ("pipeline", "fcdp", "half"),
        ("fsdp2", "groups", "half"),
        ("fcdp", "pipeline", "lora"),
        ("groups", "fsdp2-hsdp", "lora"),
    ],
)
def test_what_one_strategy_has_written_another_goes_on_from(
    ranks: Pools, folder: Path, writer: str, reader: str, tuning: Tuning
) -> None:
    theirs = written(ranks, folder, writer, tuning)
    ours = ranks.run(4, gone_on, *run_of(reader, tuning), folder / writer / tuning)
    np.testing.assert_allclose(np.mean(ours, axis=0), theirs[BEFORE:], rtol=0, atol=1e-9)


def refused(run: Run, directory: Path) -> str:
    """The error of a pipeline that reads a checkpoint of another model; it stays as it was."""
    trainable, _ = run.made("pipeline", PipelineSettings())
    before = whole(trainable)
    with pytest.raises(ValueError, match="the checkpoint") as error:
        load_held(trainable.held(), directory)
    after = whole(trainable)
    assert all((after[name] == values).all() for name, values in before.items())
    return str(error.value)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks: Pools, folder: Path) -> None:
    """Also where a rank's own stage is in it."""
    written(ranks, folder, "pipeline", "full")
    run = Run(2, 2, 1, "gpt2", "full", layers=6)
    (error,) = {*ranks.run(4, refused, run, folder / "pipeline" / "full")}
    assert "model: the checkpoint lacks transformer.h.4." in error
    assert "and has nothing besides" in error

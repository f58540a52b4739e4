"""Small cells for tests that run them, and workers with a rank that fails; imported by ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from experiments.clusters.interface import Cluster, Outcome
from experiments.records.cell import Cell, ClusterSpec
from experiments.records.record import Measurement
from experiments.runner.runner import WORKER, launch, write
from simulation.transformer import ModelSpec
from tests.experiments.golden import tables

if TYPE_CHECKING:
    import torch

NODES, RANKS_PER_NODE = 2, 2
CLUSTER = ClusterSpec(nodes=NODES, ranks_per_node=RANKS_PER_NODE)

_DEFAULTS: dict[str, Any] = tables(__file__) | {"cluster": CLUSTER}


def model_spec(
    family: Literal["gpt2", "llama"], *, layers: int = 2, width: int = 128, heads: int = 4
) -> ModelSpec:
    return ModelSpec(
        name=f"{family}-{layers}x{width}", family=family, layers=layers, width=width, heads=heads
    )


def cell(strategy: str, **settings: Any) -> Cell:
    """A cell of a few small steps; ``settings`` are those of its fields that matter."""
    return Cell.of(**{**_DEFAULTS, "model": model_spec("gpt2"), "strategy": strategy, **settings})


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    directory: Path
    outcome: Outcome
    seconds: float

    @property
    def measurement(self) -> Measurement:
        assert self.outcome.state == "ok", f"{self.cell.id}: {self.outcome}"
        file = self.directory / "measurement.json"
        return Measurement.model_validate_json(file.read_bytes())

    @property
    def sent(self) -> float:
        """Bytes a step that the busiest node has sent, by the kernel's count."""
        return self.measurement.inter_node_bytes_per_step


def run(
    cluster: Cluster, cell: Cell, directory: Path, entry: str = WORKER, *arguments: str
) -> CellResult:
    """Run one cell as the runner does; ``entry`` takes the worker's arguments and more."""
    directory.mkdir()
    write(cell, directory)
    started = time.monotonic()
    outcome, _ = launch(cluster, cell, directory, entry, *arguments)
    return CellResult(cell, directory, outcome, time.monotonic() - started)


class Runner:
    """Runs cells on a cluster, each once: a second call returns the first one's result."""

    def __init__(self, cluster: Cluster, spec: ClusterSpec, folder: Path) -> None:
        self._cluster = cluster
        self._spec = spec
        self._folder = folder
        self._results: dict[tuple[str, ...], CellResult] = {}

    def __call__(self, strategy: str, *entry: str, **settings: Any) -> CellResult:
        """Run the cell; ``entry`` is a worker in place of the usual one, and its arguments."""
        target = cell(strategy, **{"cluster": self._spec, **settings})
        key = (target.id, *entry)
        if key not in self._results:
            directory = self._folder / f"{len(self._results)}"
            self._results[key] = run(self._cluster, target, directory, *entry)
        return self._results[key]


def payload(run: CellResult, itemsize: int = 4) -> float:
    """Bytes a step of one gather and one reduction across nodes of what is trained."""
    return 2 * (NODES - 1) / NODES * run.measurement.trainable_parameters * itemsize


FAILING_WORKER = f"{__name__}:fail_in_mid_step"


def fail_in_mid_step(cell_file: str, output_directory: str, how: str, failing: str) -> None:
    """The worker, but for one rank, which ends in the backward of its second step."""
    from experiments.worker import models, worker

    build = models.build

    def build_and_hook(cell: Cell) -> Any:
        model, blocks = build(cell)
        backwards = itertools.count(1)

        def fail(*_: object) -> None:
            if next(backwards) == 2:
                _go(how)

        blocks[1].register_full_backward_pre_hook(fail)
        return model, blocks

    if os.environ["RANK"] == failing:
        models.build = build_and_hook
    worker.main(cell_file, output_directory)


def check_failed(failed: CellResult, how: str, rank: int) -> list[int]:
    """Check that the rank has ended the cell so, soon and unmeasured; return the whole steps."""
    error = str(failed.outcome.error)
    assert (failed.outcome.state, failed.outcome.rank) == ("failed", rank), error
    if how == "raise":
        assert error.startswith("Traceback")
        for part in ("ValueError: the cause of it all", "cells.py", "in step"):
            assert part in error
    else:
        assert error == f"killed by signal {how}"
    assert failed.seconds < 120
    assert not (failed.directory / "measurement.json").exists()
    file = failed.directory / "progress.jsonl"
    progress = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line)["step"] for line in progress.splitlines()]


WATCHING_WORKER = f"{__name__}:watch_deepspeed"


def watch_deepspeed(cell_file: str, output_directory: str) -> None:
    """The worker; each rank also writes which of DeepSpeed's secondary shards outlive a step."""
    from deepspeed import comm

    from baselines.deepspeed.engine import DeepSpeedZero3
    from experiments.worker import worker

    step, begin = DeepSpeedZero3.step, comm.all_gather_into_tensor
    waited: list[bool] = []

    def begin_and_watch(*args: Any, **kwargs: Any) -> Any:
        work, at = begin(*args, **kwargs), len(waited)
        waited.append(work is None)

        def wait() -> None:
            work.wait()
            waited[at] = True

        return SimpleNamespace(wait=wait)

    def step_and_look(self: Any, micro_batches: Any) -> Any:
        loss = step(self, micro_batches)
        assert {*waited} == {True}, "a step ended before its gathers"
        shards = [
            {"trained": param.requires_grad, "kept": param.ds_secondary_tensor is not None}
            for param in self.model.module.parameters()
            if not param.ds_persist  # whole on every rank: nothing to gather
        ]
        Path(output_directory, f"secondary{os.environ['RANK']}.json").write_text(json.dumps(shards))
        return loss

    comm.all_gather_into_tensor, DeepSpeedZero3.step = begin_and_watch, step_and_look
    worker.main(cell_file, output_directory)


MEASURED_WORKER = f"{__name__}:train_as_measured"


def train_as_measured(cell_file: str, output_directory: str) -> None:
    """The worker, set up as the project's first measurements were: see test_volume.py."""
    from unittest import mock

    from baselines.deepspeed import configuration as made_by
    from experiments.worker import worker
    from simulation.transformer import ATTENTION

    configuration = made_by.configuration

    def without_live_parameters(*arguments: Any) -> dict[str, Any]:
        made = configuration(*arguments)
        for limit in ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold"):
            made["zero_optimization"][f"stage3_{limit}"] = 0
        made["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        return made

    with (
        mock.patch.dict(ATTENTION, gpt2=["attn.c_attn"]),
        mock.patch.object(made_by, "configuration", without_live_parameters),
    ):
        worker.main(cell_file, output_directory)


def _go(how: str) -> None:
    if how == "raise":
        raise ValueError("the cause of it all")
    os.kill(os.getpid(), getattr(signal, how))


DYING_WORKER = f"{__name__}:die_once_per_step"


def die_once_per_step(cell_file: str, output_directory: str) -> None:
    """The worker; its last rank is killed before a step once per byte of its file in ``deaths``."""
    from experiments.worker import worker

    batches = worker._Training._batches

    def batches_or_death(training: worker._Training) -> list[torch.Tensor]:
        death = training.output.parent / "deaths" / str(len(training.losses))
        last = training.topology.rank == training.topology.world_size - 1
        if last and death.exists() and (times := death.stat().st_size):
            os.truncate(death, times - 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return batches(training)

    worker._Training._batches = batches_or_death  # type: ignore[method-assign]
    worker.main(cell_file, output_directory)

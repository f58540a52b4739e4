"""W&B while a cell runs: its steps so far are in W&B's file, with the times at which they ended."""

import json
import time
from pathlib import Path

import pytest
import wandb

from experiments.records.cell import Cell, ClusterSpec
from experiments.tracking import Live, export
from experiments.worker import progress
from tests.experiments.stand_in import cell, record
from tests.experiments.tracking import offline
from tests.experiments.waiting import wait_until

STARTED_AT = record(cell()).started_at
CLUSTER = ClusterSpec(nodes=2, ranks_per_node=2)
RANKS = 4


def start(live: Live, of: Cell, directory: Path) -> Path:
    """Have the cell begin, in a folder of its own; return that."""
    folder = directory / "cells" / of.id
    folder.mkdir(parents=True)
    live.cell_started(of, folder, STARTED_AT)
    return folder


def step(folder: Path, number: int, at: float, ranks: int = RANKS) -> None:
    """Have so many ranks end the step; their mean loss is ``6 - number``, the slowest is rank 1."""
    for rank in range(ranks):
        loss = 6.0 - number + (rank - (RANKS - 1) / 2)
        seconds = 0.5 if rank == 1 else 0.25
        line = {"step": number, "of": 4, "loss": loss, "seconds": seconds, "at": at + rank}
        with (folder / progress(rank)).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def wait_for_steps(directory: Path, number: int) -> None:
    """Wait until W&B's file of the one run has so many."""
    wait_until(lambda: [len(run.history) for run in offline.runs(directory)] == [number])


def test_steps_are_there_while_the_cell_runs(tmp_path: Path) -> None:
    of = cell(strategy="fcdp", cluster=CLUSTER, warmup_steps=1)
    with Live(tmp_path, pytest.fail) as live:
        folder = start(live, of, tmp_path)
        begun, clock = time.time(), time.monotonic()
        for number in (1, 2, 3):
            step(folder, number, begun + 10 * number)
            wait_for_steps(tmp_path, number)
        step(folder, 4, begun + 40)
        live.cell_finished(record(of))
    (run,) = offline.runs(tmp_path)
    assert (run.name, run.group, run.job_type) == (of.id, "small", "fcdp")
    assert [point["loss"] for point in run.history] == [5.0, 4.0, 3.0, 2.0]
    assert [point["_step"] for point in run.history] == [1, 2, 3, 4]
    assert [point.get("step_seconds") for point in run.history] == [None, 0.5, 0.5, 0.5]
    # Times are those that rank 0 gave, not those at which W&B was told.
    assert [point["_timestamp"] - begun for point in run.history] == pytest.approx([10, 20, 30, 40])
    assert 0 < run.history[-1]["_runtime"] < time.monotonic() - clock
    # Nothing is left to be written at the end.
    assert export([record(of)], tmp_path).runs == 0


def test_what_the_runner_does_not_see_is_logged_from_the_record(tmp_path: Path) -> None:
    """Ranks of nodes without a common folder write no lines here."""
    of = cell(cluster=CLUSTER, warmup_steps=1)
    figures = {"losses": [5.0, 4.0, 3.5, 3.25], "step_seconds": [0.5, 0.75, 0.875]}
    with Live(tmp_path, pytest.fail) as live:
        folder = start(live, of, tmp_path)
        step(folder, 1, time.time())
        wait_for_steps(tmp_path, 1)
        step(folder, 2, time.time(), ranks=RANKS - 1)
        live.cell_finished(record(of, **figures))
    (run,) = offline.runs(tmp_path)
    assert [point["_step"] for point in run.history] == [1, 2, 3, 4]
    assert [point["loss"] for point in run.history] == figures["losses"]
    seconds = [point.get("step_seconds") for point in run.history]
    assert seconds == [None, *figures["step_seconds"]]


@pytest.mark.parametrize(("where", "call"), [(wandb, "init"), (wandb.sdk.wandb_run.Run, "log")])
def test_a_cell_after_an_error_has_a_run_of_its_own(
    where: object, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    first, second = cell(sequence_length=16), cell(sequence_length=32)
    with Live(tmp_path, pytest.fail) as live:
        with monkeypatch.context() as patch:
            patch.setattr(where, call, fail)
            step(start(live, first, tmp_path), 1, time.time())
            live.cell_finished(record(first))
            (warning,) = export([record(first)], tmp_path).warnings
            assert warning == "1 W&B runs not written: no space left"
        step(start(live, second, tmp_path), 1, time.time())
        live.cell_finished(record(second))
    assert {run.name for run in offline.runs(tmp_path)} >= {second.id}
    assert export([record(first)], tmp_path).runs == 1

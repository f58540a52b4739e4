"""Cells that save on a schedule: ranks are killed, and results are as if none had been."""

from pathlib import Path
from typing import Any

import pytest

from experiments.clusters.emulated import EmulatedCluster
from experiments.clusters.interface import LostNodeError
from experiments.records.cell import Cell
from experiments.records.record import Measurement, Record
from experiments.runner import runner
from experiments.runner.directory import RunDirectory
from experiments.worker import CHECKPOINT
from tests.experiments.cells import DYING_WORKER, Runner, cell
from tests.experiments.stand_in import Observer

#: Three steps of warm-up and six that are measured; checkpoints after the second, fourth, …
SETTINGS = {"checkpoint_every": 2, "warmup_steps": 3, "steps": 6, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WORKER", DYING_WORKER)


def finish(cluster: EmulatedCluster, of: Cell, directory: RunDirectory, *deaths: int) -> Record:
    """Run a cell as the only one of its matrix; its last rank dies before these steps."""
    (directory.cells / "deaths").mkdir(parents=True, exist_ok=True)
    for step in deaths:
        (directory.cells / "deaths" / str(step)).write_bytes(b"." * deaths.count(step))
    return runner._Runner(cluster, directory, [Observer()]).finish(of)


def measured(record: Record) -> Measurement:
    assert record.measurement is not None, record.error
    return record.measurement


def check(disturbed: Measurement, undisturbed: Measurement, *resumed_at: int) -> None:
    """Check that it trained alike, and counted each step once and nothing of a checkpoint."""
    assert disturbed.resumed_at == list(resumed_at)
    assert disturbed.losses == undisturbed.losses
    assert len(disturbed.step_seconds) == 6
    ledgers = [each.ledger_bytes_per_step for each in (disturbed, undisturbed)]
    if disturbed.engine == "pipeline":  # to look at shapes, each start gathers inside the node
        ledgers = [ledger["inter_node"] for ledger in ledgers]
    assert ledgers[0] == ledgers[1]
    assert disturbed.cache == undisturbed.cache
    sent = undisturbed.inter_node_bytes_per_step
    assert disturbed.inter_node_bytes_per_step == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "settings", "deaths", "resumed_at"),
    [("fcdp", {}, (1, 3, 5), (2, 4)), ("pipeline", {"within_stage": "fcdp"}, (5,), (4,))],
    ids=str,
)
def test_a_cell_whose_ranks_die_goes_on_inside_of_itself(
    cluster: EmulatedCluster,
    run: Runner,
    tmp_path: Path,
    strategy: str,
    settings: dict[str, Any],
    deaths: tuple[int, ...],
    resumed_at: tuple[int, ...],
) -> None:
    """Among the measured steps; of one strategy also before any checkpoint, and in warm-up."""
    undisturbed, directory = run(strategy, **SETTINGS, **settings), RunDirectory(tmp_path)
    record = finish(cluster, undisturbed.cell, directory, *deaths)
    check(measured(record), undisturbed.measurement, *resumed_at)
    assert not (directory.cells / record.cell_id / CHECKPOINT).exists()


def test_a_run_that_lost_a_node_goes_on_from_the_cells_checkpoint(
    cluster: EmulatedCluster, run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, directory = cell("fcdp", **SETTINGS), RunDirectory(tmp_path)
    launch = cluster.run

    def lose(*args: object, **kwargs: object) -> None:
        assert launch(*args, **kwargs).state == "failed"  # type: ignore[arg-type]
        raise LostNodeError("node 1 is gone")

    with monkeypatch.context() as patch, pytest.raises(runner.RunError, match="go on with"):
        patch.setattr(cluster, "run", lose)
        finish(cluster, of, directory, 7)
    check(measured(finish(cluster, of, directory)), run("fcdp", **SETTINGS).measurement, 6)

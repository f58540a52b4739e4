"""The runner: every cell ends as one record, whatever happens to the cell or to the runner."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.clusters.interface import ClusterError, LostNodeError, Outcome
from experiments.matrix import reader
from experiments.matrix.reader import Matrix
from experiments.records.cell import Cell
from experiments.records.provenance import ROOT
from experiments.records.record import Record
from experiments.records.record import read as read_records
from experiments.runner import runner
from experiments.runner.directory import RunDirectory, Step, last_step
from experiments.worker import CHECKPOINT, PROGRESS, progress
from simulation import files
from tests.disks import full_disk
from tests.experiments.stand_in import Observer, StandInCluster, matrix_file, record


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return reader.read(str(matrix_file(tmp_path)))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def run(
    matrix: Matrix,
    directory: RunDirectory,
    cluster: StandInCluster,
    finished: Sequence[Record] = (),
) -> list[Record]:
    return runner.run(matrix.cells, matrix.skipped, finished, cluster, directory, Observer())


def test_every_cell_is_run_and_recorded(matrix: Matrix, directory: RunDirectory) -> None:
    cluster, observer = StandInCluster(), Observer()
    result = runner.run(matrix.cells, {}, [], cluster, directory, observer)
    assert result == read_records(directory.records) == observer.finished
    assert [r.cell for r in result] == [*matrix.cells]
    assert cluster.started == observer.started == [r.cell_id for r in result]
    # Ranks set up on the open link; it is limited when they are ready.
    assert cluster.shapes == [None, 10**8] * 3 + [None, 10**7] * 3
    first = result[0]
    assert (first.state, first.error, first.evidence) == ("ok", None, "emulated")
    assert first.network == {"rate_bits_per_s": 10**8}
    assert first.seconds > 0
    cell = directory.cells / first.cell_id
    assert Cell.model_validate_json((cell / "cell.json").read_text()) == first.cell
    left = {"cell.json", "logs", "measurement.json", "progress.jsonl"}
    assert {path.name for path in cell.iterdir()} == left


def test_a_failing_cell_does_not_end_the_matrix(tmp_path: Path, directory: RunDirectory) -> None:
    extra = """\
        skip:
          - {when: {strategy: fcdp, inter_bandwidth: 10 Mbit/s}, reason: not today}
        overrides:
          - {when: {strategy: fsdp2, inter_bandwidth: 100 Mbit/s}, set: {timeout_s: 0.3}}
        """
    matrix = reader.read(str(matrix_file(tmp_path, extra=extra)))
    behaviours = {
        "zero3-full-tiny-100mbit": "raise",
        "fsdp2-full-tiny-100mbit": "hang",
        "fcdp-full-tiny-100mbit": "silent",
        "zero3-full-tiny-10mbit": "oom",
        "fsdp2-full-tiny-10mbit": "broken",
    }
    result = run(matrix, directory, StandInCluster(behaviours=behaviours))
    assert [r.state for r in result] == ["failed", "timeout", "failed", "oom", "failed", "skipped"]
    errors = [r.error or "" for r in result]
    assert errors[0].startswith("rank 1: Traceback")
    assert errors[0].endswith("RuntimeError: rank 1 raises\n")
    assert errors[1] == "not finished after 0.3 s"
    assert "rank 0 wrote no measurement.json" in errors[2]
    assert errors[3] == "rank 1: killed: out of memory"
    assert "ClusterError: the port is taken" in errors[4]
    assert str(ROOT) not in "".join(errors)
    assert errors[5] == "not today"
    assert read_records(directory.records) == result
    # The record has the last words of a rank that a signal ended.
    aborted = run(matrix, directory, StandInCluster(behaviours={"": "abort"}))[0]
    assert aborted.error.splitlines() == [
        "last lines of the log:",
        *map(str, range(81, 100)),
        "terminate called",
        "rank 1: killed by signal SIGABRT",
    ]


def test_operators_are_compiled_once_and_before_the_cells_that_need_them(
    tmp_path: Path, directory: RunDirectory
) -> None:
    strategies = "deepspeed-zero3, deepspeed-hpz, deepspeed-offload"
    matrix = reader.read(str(matrix_file(tmp_path, strategies=strategies)))
    cluster = StandInCluster()
    result = run(matrix, directory, cluster)
    assert {r.state for r in result} == {"ok"}
    assert cluster.compiled == [(), ("CPUAdamBuilder",)]
    # Where they cannot be compiled, these cells fail and no others.
    matrix = reader.read(str(matrix_file(tmp_path)))
    result = run(matrix, directory, StandInCluster(behaviours={"compiler": "no g++"}))
    states = {r.cell.strategy: r.state for r in result}
    assert states == {"deepspeed-zero3": "failed", "fsdp2": "ok", "fcdp": "ok"}
    assert result[0].error == "rank 0: no g++"


def test_a_cluster_is_built_only_if_there_is_something_to_run(
    matrix: Matrix, directory: RunDirectory
) -> None:
    class Unbuildable(StandInCluster):
        def __enter__(self) -> Unbuildable:
            raise ClusterError("no privileges")

    with pytest.raises(ClusterError, match="no privileges"):
        run(matrix, directory, Unbuildable())
    assert not directory.records.exists()
    finished = [*map(record, matrix.cells)]
    assert run(matrix, directory, Unbuildable(), finished) == finished


def test_a_cell_without_a_new_checkpoint_fails(tmp_path: Path, directory: RunDirectory) -> None:
    file = matrix_file(tmp_path, strategies="fcdp", links="unshaped")
    matrix = reader.read(str(file), changes={"checkpoint_every": 2})
    cluster = StandInCluster(behaviours={"": "raise"})
    (only,) = run(matrix, directory, cluster)
    assert (only.state, len(cluster.started)) == ("failed", 3)


@pytest.mark.parametrize(
    ("cause", "raised", "reason"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (
            LostNodeError("node 1 is lost"),
            runner.RunError,
            r"fcdp.*: node 1 is lost; .*go on with --resume",
        ),
    ],
    ids=["interrupt", "lost node"],
)
def test_what_ends_the_run_tears_the_cluster_down_and_keeps_what_is_finished(
    matrix: Matrix, directory: RunDirectory, cause: BaseException, raised: Any, reason: str | None
) -> None:
    class Ended(StandInCluster):
        def run(self, *arguments: Any, **options: Any) -> Outcome:
            if len(self.started) == 2:
                raise cause
            return super().run(*arguments, **options)

    cluster = Ended()
    with pytest.raises(raised, match=reason):
        run(matrix, directory, cluster)
    assert not cluster.entered
    finished = directory.resume(matrix, retry_failed=False)
    assert [r.cell_id for r in finished] == [cell.id for cell in matrix.cells[:2]]
    assert [r.state for r in run(matrix, directory, StandInCluster(), finished)] == ["ok"] * 6


@given(finished=st.sets(st.integers(0, 5)), torn=st.integers(0, 500), retry=st.booleans())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_resumed_matrix_has_every_cell_once(
    tmp_path_factory: pytest.TempPathFactory, finished: set[int], torn: int, retry: bool
) -> None:
    path = tmp_path_factory.mktemp("run")
    matrix = reader.read(str(matrix_file(path)))
    directory = RunDirectory(path / "run")
    ids = [cell.id for cell in matrix.cells]
    states = ["ok", "failed", "oom", "timeout", "ok", "failed"]
    for i in finished:
        cell = matrix.cells[i]
        files.append(record(cell, states[i], None), directory.records)  # type: ignore[arg-type]
    if torn and len(finished) < 6:
        left = next(i for i in range(6) if i not in finished)
        line = record(matrix.cells[left]).model_dump_json()
        directory.path.mkdir(exist_ok=True)
        with directory.records.open("a") as file:
            file.write(line[:torn])

    # Its ranks end at once, without a process, so that many examples are cheap.
    cluster = StandInCluster(behaviours={"": "oom"})
    records = directory.resume(matrix, retry_failed=retry)
    result = run(matrix, directory, cluster, records)
    retried = {i for i in finished if retry and states[i] in ("failed", "timeout")}
    assert cluster.started == [ids[i] for i in range(6) if i not in finished - retried]
    assert [r.cell_id for r in result] == ids
    assert Counter(r.cell_id for r in read_records(directory.records)) == Counter(ids)
    # Nothing of what ran again is lost either.
    earlier = [r for file in directory.path.glob("earlier/*/*.jsonl") for r in read_records(file)]
    assert retried <= {ids.index(r.cell_id) for r in earlier}


def test_what_failed_before_its_first_step_or_is_skipped_no_longer_runs(
    matrix: Matrix, directory: RunDirectory
) -> None:
    cells = matrix.cells
    for each, state in zip(cells, ("failed", "timeout", "oom", "failed", "skipped"), strict=False):
        files.append(record(each, state, None), directory.records)  # type: ignore[arg-type]
        directory.new_cell(each.id)
    (directory.cells / cells[1].id / PROGRESS).touch()
    shutil.rmtree(directory.cells / cells[3].id)  # its logs are gone: nobody knows
    finished = directory.resume(matrix, retry_failed=False)
    assert [each.cell_id for each in finished] == [cells[i].id for i in (1, 2, 3)]
    assert read_records(directory.records) == finished


@pytest.mark.parametrize("written", [b'{"step": 1}\n{"step": 2}\n', b'{"step": 1}\n{"st', b'{"st'])
def test_a_cell_that_goes_on_has_its_steps_so_far(written: bytes, directory: RunDirectory) -> None:
    cell = directory.new_cell("cell")
    by_rank = [cell / progress(rank) for rank in (0, 1, 10)]
    for file in by_rank:
        file.write_bytes(written)
    (cell / CHECKPOINT).mkdir()
    directory.new_cell("cell")
    assert {file.read_bytes() for file in by_rank} == {written[: written.rfind(b"\n") + 1]}
    (cell / CHECKPOINT).rmdir()
    assert [*directory.new_cell("cell").iterdir()] == []


def test_resuming_refuses_what_another_matrix_or_kind_of_cluster_left(
    tmp_path: Path, directory: RunDirectory
) -> None:
    """A simulated cell has the id of the emulated one, and a skipped cell says who skipped it."""
    skipped = """\
        skip:
          - {when: {strategy: [deepspeed-zero3, fsdp2, fcdp]}, reason: not today}
        """
    matrix = reader.read(str(matrix_file(tmp_path, extra=skipped)))
    run(matrix, directory, StandInCluster())
    with pytest.raises(ValueError, match="holds records of matrix 'small', not 'other'"):
        directory.resume(replace(matrix, name="other"), retry_failed=False)
    simulated = replace(matrix, simulated=True)
    with pytest.raises(ValueError, match=r"'emulated', not 'simulated'; give .* with --output"):
        directory.resume(simulated, retry_failed=False)


def test_a_full_disk_is_a_clear_error_and_loses_nothing(
    matrix: Matrix, directory: RunDirectory
) -> None:
    run(matrix, directory, StandInCluster(behaviours={"": "oom"}))
    earlier = read_records(directory.records)[:-1]
    directory.records.write_text("".join(r.model_dump_json() + "\n" for r in earlier))
    size = directory.records.stat().st_size
    message = r"cannot write to .*File too large.*--resume"
    with full_disk(size + 10), pytest.raises(runner.RunError, match=message):
        run(matrix, directory, StandInCluster(behaviours={"": "oom"}), earlier)
    assert read_records(directory.records) == earlier
    assert directory.records.stat().st_size == size
    run(matrix, directory, StandInCluster(behaviours={"": "oom"}), earlier)
    assert len(read_records(directory.records)) == len(matrix.cells)


def test_steal_is_a_share_of_the_time_that_has_passed_since_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = runner.look()  # at this machine
    assert machine.cores >= 1
    assert 0 <= machine.steal_share <= 1
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    shares = []
    for idle, steal in ((1000, 10), (1060, 50), (1160, 50)):
        # user nice system idle iowait irq softirq steal guest guest_nice, in jiffies
        text = f"cpu  100 0 50 {idle} 0 0 0 {steal} 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
        (tmp_path / "stat").write_text(text)
        shares.append(runner.machine(0.5).steal_share)
    assert shares[1:] == [pytest.approx(0.4), 0.0]


def test_the_last_step_is_of_a_complete_line(tmp_path: Path) -> None:
    file = tmp_path / PROGRESS
    assert last_step(tmp_path) is None
    line = '{"step": 1, "of": 2, "loss": 5.0, "seconds": 0.5, "at": 0.0}\n'
    for torn in ("", line[:20]):
        file.write_text(torn)
        assert last_step(tmp_path) is None
        file.write_text(line + torn)
        assert last_step(tmp_path) == Step(1, 2, 5.0, 0.5, 0.0)
    file.write_text(line + '{"step": 2, "of": 2, "loss": NaN, "seconds": 0.5, "at": 0.0}\n{"st')
    last = last_step(tmp_path)
    assert last.step == 2
    assert math.isnan(last.loss)

"""The cluster kind ``simulated``: matrices whose cells the simulator answers."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from experiments.clusters.interface import ClusterError
from experiments.clusters.simulated import SimulatedCluster
from experiments.matrix import reader
from experiments.records.cell import Cell, ClusterSpec, SimulatedSpec
from experiments.records.provenance import ROOT
from experiments.records.record import Record
from experiments.records.record import read as read_records
from experiments.runner import runner
from experiments.runner.directory import RunDirectory
from tests.experiments.cells import cell, model_spec
from tests.experiments.command_line import printed
from tests.experiments.stand_in import Observer

SPEC = SimulatedSpec(kind="simulated", nodes=2, ranks_per_node=8, gpu="a40")


def simulated(strategy: str, **settings: Any) -> Cell:
    return cell(strategy, **{"cluster": SPEC, "dtype": "bfloat16", **settings})


def run(cells: list[Cell], directory: Path) -> list[Record]:
    cluster = SimulatedCluster(cells[0].cluster)
    return runner.run(cells, {}, [], cluster, RunDirectory(directory), Observer())


def test_what_does_not_fit_is_oom_and_what_cannot_be_simulated_fails_alone(tmp_path: Path) -> None:
    wide = model_spec("gpt2", layers=40, width=8192, heads=64)
    fits = simulated("fcdp", inter_bandwidth_bits_per_s=10**9)
    cells = [simulated("ddp", model=wide), simulated("fcdp", dtype="float32"), fits]
    large, single, last = run(cells, tmp_path)
    assert (large.state, large.measurement) == ("oom", None)
    assert "a device needs" in large.error
    assert single.state == "failed"
    assert "allowed: bfloat16" in single.error
    assert last.state == "ok"
    # The record has all that was assumed of the cluster.
    assert last.network["device"]["name"] == "a40"
    assert last.network["inter_bytes_per_s"] == 0.8 * 10**9 / 8


def test_rented_nodes_are_not_known_and_recomputing_is_another_cell() -> None:
    with pytest.raises(ClusterError, match=r"cluster\.kind = 'rented': is not simulated"):
        SimulatedCluster(ClusterSpec(kind="rented", nodes=2, ranks_per_node=8))
    assert simulated("fcdp", recomputed=1.0).id != simulated("fcdp").id


def test_the_command_simulates_a_matrix_of_another_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No privileges, no namespaces; records apart from those of the cells that really ran.

    As every run it sweeps what killed ones left.
    """
    from experiments import terminal
    from experiments.commands import kinds, session

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kinds, "enter_namespace", lambda: pytest.fail("is not needed"))
    monkeypatch.setattr(terminal, "raise_them", lambda: None)
    monkeypatch.setattr(session, "finish", lambda *arguments, **options: True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"fcdp-{os.stat('/proc/self/ns/pid').st_ino}-{2**22 - 1}-1-0-x"
    left.mkdir()
    output = printed("run", "parity", "--cluster", "simulated", "--only", "mics-full")
    assert "4 cells · simulated cluster, 2 nodes × 2 ranks" in output
    assert "emulated" not in output
    assert str(ROOT) not in output
    assert not left.exists()
    records = read_records(tmp_path / "runs" / "parity-simulated" / "records.jsonl")
    # Also what this machine could not run.
    assert {"mics", "deepspeed-mics"} <= {record.cell.strategy for record in records}
    for record in records:
        assert (record.state, record.evidence, record.error) == ("ok", "simulated", None)
        measurement = record.measurement
        (seconds,) = measurement.step_seconds
        assert measurement.losses == []
        assert record.tokens_per_s == record.cell.tokens_per_step / seconds
        sent = sum(measurement.ledger_bytes_per_step["inter_node"].values())
        assert sent == measurement.inter_node_bytes_per_step
        critical = measurement.simulation.critical_seconds
        assert sum(critical.values()) == pytest.approx(seconds)


def test_cells_of_any_matrix_keep_their_ids_when_they_are_simulated() -> None:
    here, there = reader.read("parity"), reader.read("parity", simulated=True)
    assert [cell.id for cell in here.cells] == [cell.id for cell in there.cells]
    assert {*there.skipped.values()} == {"accumulation is compared on full fine-tuning only"}

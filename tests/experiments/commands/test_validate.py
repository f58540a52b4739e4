"""``python -m experiments validate`` on committed records."""

import shutil
from pathlib import Path

import pytest

from experiments.commands import kinds
from experiments.commands.validate import CALIBRATION
from experiments.matrix import reader
from experiments.records.cell import ClusterSpec
from experiments.records.modelled import cluster_of, measured_step, workload_of
from experiments.records.record import Record, read
from experiments.records.select import PREDICTIONS
from simulation import files
from simulation.calibration import calibrate
from simulation.emulated import Constants, emulated
from simulation.prediction import predict
from tests.experiments.command_line import printed, refused
from tests.experiments.preflight.made_up import preflight
from tests.experiments.stand_in import cell, record
from tests.programs import RESULTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(RESULTS / "slow-link" / "records.jsonl", tmp_path)
    return tmp_path


def test_neither_simulated_cells_nor_those_of_a_gpu_are_held_against_a_cpus_constants(
    folder: Path,
) -> None:
    file = folder / "records.jsonl"
    emulated, simulated = ('"evidence":"emulated"', '"evidence":"simulated"')
    file.write_text(file.read_text("utf-8").replace(emulated, simulated), "utf-8")
    assert "no cell that ran to its end" in refused("validate", folder)
    shutil.copy(RESULTS / "one-gpu" / "records.jsonl", folder)
    assert "no cell that ran to its end" in refused("validate", folder)
    assert not (folder / PREDICTIONS).exists()


#: A machine unlike that of the committed records.
OTHER = Constants(
    flops=100e9,
    block_seconds={"ddp": 0.02, "deepspeed": 0.1, "fcdp": 0.05, "fsdp2": 0.04},
    step_seconds={"ddp": 0.01, "deepspeed": 0.05, "fcdp": 0.02, "fsdp2": 0.03},
    message_seconds=1e-3,
    byte_seconds=1e-9,
    gathered_byte_seconds=0.5e-9,
    activation_byte_seconds=0.4e-9,
)


def timed_on(constants: Constants) -> list[Record]:
    """The cells of ``calibration`` as a machine of these constants would time them."""
    records = []
    matrix = reader.read(CALIBRATION)
    for of in matrix.cells:
        skipped = matrix.skipped.get(of.id)
        hardware = emulated(of.cluster.nodes, of.cluster.ranks_per_node, None, constants)
        seconds = predict(workload_of(of), hardware).step_seconds
        state = "ok" if skipped is None else "skipped"
        records.append(record(of, state, skipped, step_seconds=[seconds]))  # type: ignore[arg-type]
    return records


def test_the_calibrations_cells_tell_all_constants_apart() -> None:
    measured = (measured_step(each, cluster_of(each.cell)) for each in timed_on(OTHER))
    fitted = calibrate([step for step in measured if step is not None])
    for name, expected in vars(OTHER).items():
        near = 0.01 if name in ("flops", "block_seconds") else 0.05
        least = 1e-11 if isinstance(expected, float) else 1e-5  # a byte's and a call's: may be 0
        assert getattr(fitted, name) == pytest.approx(expected, rel=near, abs=least), name


def test_a_calibrated_machine_is_predicted_by_its_own_constants(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kinds, "enter_namespace", lambda: None)
    for made_up in timed_on(OTHER):  # it was calibrated before, so that nothing is run
        files.append(made_up, tmp_path / "runs" / CALIBRATION / "records.jsonl")
    output = printed("validate", "--calibrate", folder)
    assert "constants of this machine, from runs/calibration" in output
    for predicted in read(folder / PREDICTIONS):
        constants = predicted.network["overheads"]["block_seconds"]
        assert constants == pytest.approx(dict(OTHER.block_seconds), rel=0.01)
    assert "constants of the host of the committed records" in printed("validate", folder)
    ran, predictions = (read(folder / file) for file in ("records.jsonl", PREDICTIONS))
    assert [record.cell_id for record in predictions] == [record.cell_id for record in ran]
    assert {(of.evidence, str(of.network)) for of in predictions} == {("simulated", "{}")}


def test_rented_nodes_are_predicted_by_what_preflight_measured_of_them(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(preflight().model_dump_json(), "utf-8")

    def measure_on(ranks: int) -> None:
        nodes = ClusterSpec(kind="rented", nodes=2, ranks_per_node=ranks)
        of = cell(cluster=nodes, dtype="bfloat16", inter_bandwidth_bits_per_s=None)
        measured = record(of).model_copy(update={"evidence": "measured"})
        files.write([measured], tmp_path / "records.jsonl")

    measure_on(8)
    unknown = refused("validate", tmp_path)
    assert "1 measured cells are left out, as their nodes are not known" in unknown
    assert "--preflight" in unknown
    words = ("validate", tmp_path, "--preflight", file, "--gpu", "a40")
    printed(*words)
    (predicted,) = read(tmp_path / PREDICTIONS)
    assert predicted.evidence == "simulated"
    assert predicted.network["name"] == "2x8-a40-measured"
    assert predicted.network["inter_bytes_per_s"] == 1e9
    measure_on(4)
    message = refused(*words)
    assert "--preflight: is of 2 × 8 ranks" in message
    assert "ran on 2 × 4" in message

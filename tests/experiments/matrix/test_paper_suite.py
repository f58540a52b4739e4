"""The matrices of the repository: all strategies, and the paper's suite on a simulated cluster."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from baselines.registry import SIBLINGS, STRATEGIES
from experiments.matrix import files, reader
from experiments.records.cell import Cell, SimulatedSpec
from experiments.records.modelled import cluster_of, hardware_of, workload_of
from experiments.records.record import read
from simulation.prediction import fits, predict
from tests.experiments.matrix.files import SIMULATED, written
from tests.programs import RESULTS

SUITE = files.members("paper")


def cells(name: str) -> list[Cell]:
    return [*reader.read(name).cells]


def test_only_the_link_between_nodes_has_the_share_of_it() -> None:
    link = 100_000_000_000
    spec = SimulatedSpec(kind="simulated", nodes=2, ranks_per_node=8, gpu="a40")
    whole = hardware_of(spec, link)
    hardware = hardware_of(spec.model_copy(update={"inter_efficiency": 0.4}), link)
    assert hardware.inter_bytes_per_s == pytest.approx(0.4 * link / 8)
    assert replace(hardware, inter_bytes_per_s=whole.inter_bytes_per_s) == whole


def test_no_larger_micro_batch_fits() -> None:
    for cell in cells("paper/largest"):
        hardware = cluster_of(cell)
        one_more = cell.model_copy(update={"micro_batch": cell.micro_batch + 1})
        assert not fits(workload_of(one_more), hardware)
        # A cell of which none fits has micro-batch 1, and ends out of memory.
        assert cell.micro_batch == 1 or fits(workload_of(cell), hardware)


def test_nodes_and_largest_micro_batches_are_settings_of_simulated_clusters(tmp_path: Path) -> None:
    document = yaml.safe_load(SIMULATED)
    document["axes"]["nodes"] = [1, 4]
    document["workload"]["micro_batch"] = "max"
    for rules in ("skip", "overrides"):
        del document[rules]
    simulated = cells(written(tmp_path, yaml.safe_dump(document)))
    assert {cell.cluster.nodes for cell in simulated} == {1, 4}
    assert min(cell.micro_batch for cell in simulated) > 1000
    assert len({cell.id for cell in simulated}) == len(simulated)


@pytest.mark.parametrize("name", SUITE)
def test_committed_records_are_of_these_cells_and_what_the_simulator_says(
    name: str, request: pytest.FixtureRequest
) -> None:
    """A sample of each long matrix is simulated; all cells with ``--exhaustive``."""
    committed = read(RESULTS / name / "records.jsonl")
    assert [record.cell_id for record in committed] == [cell.id for cell in cells(name)]
    ran = [record for record in committed if record.state != "skipped"]
    stride = 1 if request.config.getoption("--exhaustive") else 1 + len(ran) // 16
    for record in ran[::stride]:
        hardware = cluster_of(record.cell)
        prediction = predict(workload_of(record.cell), hardware)
        assert record.state == prediction.state
        if record.measurement is not None:
            assert record.measurement.step_seconds == [pytest.approx(prediction.step_seconds)]
            sent = record.measurement.inter_node_bytes_per_step
            assert sent == pytest.approx(prediction.inter_node_bytes)


@pytest.mark.parametrize("name", files.available())
def test_matrices_of_the_repository(name: str) -> None:
    expanded = reader.read(name)
    assert expanded.name == name
    assert len({cell.id for cell in expanded.cells}) == len(expanded.cells) > 1


@pytest.mark.parametrize("name", ["baselines", "parity"])
def test_matrices_of_all_strategies_leave_none_out(name: str) -> None:
    """A new strategy belongs into them; systems of other papers have matrices of their own."""
    strategies = [cell.strategy for cell in reader.read(name).cells]
    assert set(strategies) == {of.name for of in STRATEGIES} - {of.name for of in SIBLINGS}

"""``preflight`` on an emulated cluster measures the link that was set."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.clusters import start_barrier
from experiments.clusters.interface import ClusterError, Launch, Outcome
from experiments.commands import preflight
from experiments.preflight.schema import Preflight, Probed
from tests import programs
from tests.experiments.command_line import printed
from tests.experiments.preflight import made_up
from tests.experiments.stand_in import StandInCluster
from tests.simulation.planner.made_up import config_file


@pytest.mark.system
@pytest.mark.usefixtures("privileged")
def test_it_measures_an_emulated_cluster_and_says_how_to_plan_for_it(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    words = ("--bandwidth", "100 Mbit/s", "--ranks", "1", "--output", str(file))
    command = (sys.executable, "-m", "experiments", "preflight", *words)
    output = programs.printed(*command, within_s=200)
    measured = Preflight.read(file)
    assert measured.evidence == "emulated"
    assert measured.network["rate_bits_per_s"] == 10**8
    # Headers take one per cent of it.
    assert measured.links.inter_node_all_gather.bytes_per_s == pytest.approx(100e6 / 8, rel=0.15)
    assert measured.links.intra_node_all_gather is None
    assert measured.compute.device == "cpu"
    assert measured.host.to_device_bytes_per_s is None
    assert "between nodes, gather, a node sends" in output
    assert f"figures  {file}" in output
    plan = shlex.split(output.splitlines()[-1].partition("python -m experiments ")[2])
    assert plan == ["plan", "--preflight", str(file), "--model", "MODEL"]
    model = config_file(tmp_path, num_hidden_layers=1, hidden_size=64, vocab_size=256)
    assert "take " in printed(*plan[:-1], model)


@pytest.mark.parametrize(
    ("disabled", "said", "warned"),
    [
        ("1", "NCCL INFO Using network IBext_v8", ["NCCL_IB_DISABLE = 1, and NCCL sends by"]),
        ("1", "NCCL INFO Using network Socket", []),
        ("0", "NCCL INFO Using network IBext_v8", []),
        ("1", "nothing", []),
    ],
)
def test_a_plugin_that_stays_on_is_noticed(
    disabled: str, said: str, warned: list[str], tmp_path: Path
) -> None:
    """NCCL names what it sends by in its log, if it is asked to."""

    class Probing(StandInCluster):
        nodes = ranks_per_node = 2

        def shape(self, *_: object) -> dict[str, Any]:
            return {"nccl": {"NCCL_IB_DISABLE": disabled}}

        def run(self, launch: Launch) -> Outcome:
            assert launch.environment["NCCL_DEBUG"] == "INFO"
            launch.logs.mkdir()
            (launch.logs / "rank0.log").write_text(f"node0:1:2 [0] {said}\n")
            probed = made_up.preflight().model_dump(include={*Probed.model_fields})
            (tmp_path / "measured" / "probed.json").write_text(json.dumps(probed))
            start_barrier.wait(tmp_path / "measured")
            return Outcome("ok")

    measured = preflight.measure(Probing(), None, tmp_path / "measured")
    assert [text.partition(" IBext_v8:")[0] for text in preflight.warnings(measured)] == warned


def test_one_memory_of_cpu_and_gpu_is_noticed() -> None:
    measured = made_up.preflight()
    assert [*preflight.warnings(measured)] == []
    compute = measured.compute.model_copy(update={"one_memory": True})
    (warning,) = preflight.warnings(measured.model_copy(update={"compute": compute}))
    assert "a cache in host memory gains nothing" in warning


def test_a_rank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Outcome("failed", 3, "ValueError: the cause of it all")
    monkeypatch.setattr(StandInCluster, "run", lambda *_, **__: failed)
    message = "failed: rank 3: ValueError: the cause"
    with StandInCluster() as cluster, pytest.raises(ClusterError, match=message):
        preflight.measure(cluster, None, tmp_path / "logs")

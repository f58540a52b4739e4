"""``preflight`` on an emulated cluster measures the link that was set."""

import shlex
import sys
from pathlib import Path

import pytest

from experiments.clusters.interface import ClusterError, Outcome
from experiments.commands import preflight
from experiments.preflight.schema import Preflight
from tests import programs
from tests.experiments.command_line import printed
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


def test_a_rank_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Outcome("failed", 3, "ValueError: the cause of it all")
    monkeypatch.setattr(StandInCluster, "run", lambda *_, **__: failed)
    message = "failed: rank 3: ValueError: the cause"
    with StandInCluster() as cluster, pytest.raises(ClusterError, match=message):
        preflight.measure(cluster, None, tmp_path / "logs")

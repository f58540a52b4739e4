"""Rented nodes as the launcher's variables describe them."""

import os
import re
from pathlib import Path

import pytest

from experiments.clusters.allocation import Allocation, Srun, Ssh, port, visible_gpus
from experiments.clusters.interface import ClusterError
from experiments.records.cell import ClusterSpec
from tests.programs import written

GOOD = {"FCDP_HOSTS": "10.0.0.1, me@10.0.0.2", "FCDP_RANKS_PER_NODE": "8"}


def test_hosts_make_a_cluster_of_this_machine_and_others_that_ssh_reaches() -> None:
    allocation = Allocation.from_env(GOOD)
    assert allocation.spec == ClusterSpec(kind="rented", nodes=2, ranks_per_node=8)
    assert allocation.head_address() == "10.0.0.1"
    launcher = allocation.launcher
    assert launcher == Ssh(("10.0.0.1", "me@10.0.0.2"))
    assert "ssh" not in launcher.command(0)
    # Nothing to be asked for, and no machine that is waited for without end.
    options = {"BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=5"}
    assert options | {"me@10.0.0.2"} <= {*launcher.command(1)}


def test_a_prefix_starts_the_program_of_the_others_in_a_container() -> None:
    prefix = "docker run --interactive 'an image'"
    launcher = Allocation.from_env(GOOD | {"FCDP_PREFIX": prefix}).launcher
    assert "docker" not in launcher.command(0)
    assert launcher.command(1)[-1].startswith(f"{prefix} /")


def test_a_slurm_allocation_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = '[ "$2" = hostnames ] && printf "a\\nb\\n" || echo "NodeName=a NodeAddr=10.0.0.7 X=1"'
    written(tmp_path / "scontrol", answers)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-b]", "FCDP_RANKS_PER_NODE": "1"}
    allocation = Allocation.from_env(slurm)
    assert allocation.launcher == Srun(("a", "b"))
    assert allocation.head_address() == "10.0.0.7"
    # A list of hosts is asked for; an allocation may be there anyway.
    assert isinstance(Allocation.from_env(slurm | GOOD).launcher, Ssh)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClusterError, match=r"scontrol show hostnames .*No such file"):
        Allocation.from_env(slurm)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FCDP_HOSTS", " ", "no rented nodes: set FCDP_HOSTS"),
        ("FCDP_RANKS_PER_NODE", "-1", "FCDP_RANKS_PER_NODE = '-1': allowed are whole numbers"),
        ("FCDP_PREFIX", "docker 'x", "FCDP_PREFIX = .*No closing quotation; must be words"),
        ("FCDP_RANKS_PER_NODE", "²", "FCDP_RANKS_PER_NODE = '²': allowed are whole numbers"),
    ],
)
def test_a_mistake_names_the_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Allocation.from_env(GOOD | {name: value})


def test_the_port_is_the_matrixs_unless_a_variable_sets_it() -> None:
    assert port({}, 29600) == 29600
    assert port({"FCDP_PORT": "29700"}, 29600) == 29700
    with pytest.raises(ClusterError, match="FCDP_PORT = '80': allowed are whole numbers from 1024"):
        port({"FCDP_PORT": "80"}, 29600)


def test_a_head_that_others_cannot_reach_is_refused() -> None:
    environment = GOOD | {"FCDP_HOSTS": "localhost other"}
    with pytest.raises(ClusterError, match=r"localhost is 127\.0\.0\.1 here.*set FCDP_HEAD"):
        Allocation.from_env(environment).head_address()
    assert Allocation.from_env(environment | {"FCDP_HEAD": "10.0.0.3"}).head_address() == "10.0.0.3"
    for name in ("nowhere.invalid", "two..dots", "x" * 64):
        with pytest.raises(ClusterError, match=f"{re.escape(name)}: no address of the first node"):
            Allocation.from_env(GOOD | {"FCDP_HEAD": name}).head_address()


@pytest.mark.parametrize(("chosen", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0)])
def test_ranks_are_visible_gpus_by_default(tmp_path: Path, chosen: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, tmp_path) == count
    with pytest.raises(ClusterError, match="FCDP_RANKS_PER_NODE is not set and this machine"):
        Allocation.from_env({"FCDP_HOSTS": GOOD["FCDP_HOSTS"], "CUDA_VISIBLE_DEVICES": ""})

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import netns

from experiments.clusters import lifetimes, namespaces
from experiments.clusters.emulated import EmulatedCluster
from experiments.clusters.interface import ClusterError, Outcome
from experiments.records import provenance
from experiments.records.cell import ClusterSpec
from tests.experiments.clusters.on_ranks import ON_RANKS, described, lingering, pids_below, run
from tests.experiments.planted import plant
from tests.experiments.waiting import is_running, wait_until, wait_until_ended

pytestmark = pytest.mark.usefixtures("privileged")
PRELOAD = ("torch.distributed", ON_RANKS)


@pytest.fixture(scope="module")
def cluster(privileged: None, fork_server: None) -> Iterator[EmulatedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=2), preload=PRELOAD) as built:
            yield built


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every run, no process is left in any node."""
    yield
    if "cluster" in request.fixturenames:
        names = [name for name in netns.listnetns() if f"-{os.getpid()}-" in name]
        assert [namespaces.processes(name) for name in names] == [[]] * len(names)


def test_what_a_rank_sees(cluster: EmulatedCluster, tmp_path: Path) -> None:
    seen = described(cluster, tmp_path, OMP_NUM_THREADS="2")
    for rank, each in enumerate(seen):
        environment = each["environment"]
        assert environment["MASTER_PORT"] == "29500"
        assert each["threads"] == 2
        assert each["cores"] == [provenance.cores()]
        assert each["interfaces"] == sorted(["lo", environment["FCDP_INTERFACE"]])
        for library in ("GLOO", "TP", "NCCL"):
            assert environment[f"{library}_SOCKET_IFNAME"] == environment["FCDP_INTERFACE"]
        assert environment["NCCL_HOSTID"] == f"node{rank // 2}-rank{rank % 2}"
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert f"out of rank {rank}\n" in log
        assert f"err of rank {rank}\n" in log
    assert len({each["pid"] for each in seen}) == 4
    # Temporary files are the node's own, and end with the launch.
    folders = [Path(each["temporary"]).parent for each in seen]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert {Path(tempfile.gettempdir()) in folder.parents for folder in folders} == {True}
    assert not any(folder.exists() for folder in folders)


def test_ranks_with_a_gpu_each_are_one_host_per_node(
    cluster: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hosts = [each["environment"]["NCCL_HOSTID"] for each in described(cluster, tmp_path)]
    assert hosts == ["node0", "node0", "node1", "node1"]


def test_nodes_have_cores_of_their_own(
    cluster: EmulatedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = provenance.cores()
    if len(cores) < 2:
        pytest.skip("there is no core per node")
    spec = ClusterSpec(nodes=2, ranks_per_node=2, cores="own")
    with EmulatedCluster(spec, preload=PRELOAD) as apart:
        seen = [rank["cores"] for rank in described(apart, tmp_path)]
    each = len(cores) // 2
    assert seen == [[cores[:each]]] * 2 + [[cores[each : 2 * each]]] * 2
    monkeypatch.setattr(provenance, "cores", lambda: cores[:1])
    with pytest.raises(ClusterError, match="cores = 'own': 2 nodes need a core each, and"):
        EmulatedCluster(spec, preload=PRELOAD).__enter__()


def test_a_module_that_was_preloaded_from_elsewhere_is_an_error(
    cluster: EmulatedCluster, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    outcome = run(cluster, tmp_path / "logs", "add_up", PYTHONPATH=str(tmp_path))
    assert outcome.state == "failed"
    assert f"torch: preloaded, so not imported from {tmp_path}" in str(outcome.error)


CAUSES = [
    ("raise and clean up", 3, "ValueError: the cause of it all"),
    ("exit", 0, "SystemExit: 3"),
    ("vanish", 3, "ended with exit code 0 before its function returned"),
    ("SIGKILL", 0, "killed by signal SIGKILL"),
]


@pytest.mark.always
@pytest.mark.parametrize(("how", "rank", "error"), CAUSES, ids=[how for how, *_ in CAUSES])
def test_the_rank_that_failed_first_is_named(
    cluster: EmulatedCluster, tmp_path: Path, how: str, rank: int, error: str
) -> None:
    started = time.monotonic()
    outcome = run(cluster, tmp_path, "fail", how, str(rank))
    assert (outcome.state, outcome.rank) == ("failed", rank), outcome.error
    assert error in outcome.error
    assert time.monotonic() - started < 50


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MB, for one process."""
    path = Path("/sys/fs/cgroup/memory", f"fcdp-test-{os.getpid()}")
    limit = "memory.limit_in_bytes"
    if not path.parent.exists():
        path, limit = Path("/sys/fs/cgroup", path.name), "memory.max"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        if not (path / limit).exists():
            pytest.skip(f"{path.parent} has no memory controller")
        (path / limit).write_text("200000000")
        yield path
    finally:
        wait_until(lambda: not (path / "cgroup.procs").read_text())
        path.rmdir()


def test_a_rank_that_the_kernel_kills_for_its_memory_is_out_of_memory(
    cluster: EmulatedCluster, tmp_path: Path, small_cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_CGROUP", str(small_cgroup))
    outcome = run(cluster, tmp_path, "fail", "kernel out of memory", "1")
    assert (outcome.state, outcome.rank) == ("oom", 1), outcome.error


@pytest.mark.system
def test_ranks_that_wait_in_vain_are_ended_after_a_failure(
    cluster: EmulatedCluster, tmp_path: Path
) -> None:
    started = time.monotonic()
    outcome = run(cluster, tmp_path, "fail_while_others_linger", str(tmp_path))
    assert (outcome.state, outcome.rank) == ("failed", 0)
    assert "ValueError: the cause of it all" in str(outcome.error)
    assert time.monotonic() - started < 50, "of the 100 s that a launch may take"
    assert not any(map(is_running, pids_below(tmp_path)))


@pytest.mark.system
def test_a_launch_that_does_not_end_is_ended(cluster: EmulatedCluster, tmp_path: Path) -> None:
    outcome = run(cluster, tmp_path, "linger", str(tmp_path), timeout_s=3)
    assert outcome == Outcome("timeout", None, "did not end within 3 s")
    pids = pids_below(tmp_path)
    assert pids
    assert not any(map(is_running, pids))


def test_a_port_in_use_is_named(cluster: EmulatedCluster, tmp_path: Path) -> None:
    (node,) = (name for name in netns.listnetns() if f"-{os.getpid()}-" in name and "node0" in name)
    with namespaces.call_in(node, lambda: socket.create_server(("", 29500))):
        with pytest.raises(
            ClusterError, match=r"198\.18\.0\.1 port 29500: Address .* FCDP_PORT=\d+ is"
        ):
            run(cluster, tmp_path, "add_up")
        assert not list(tmp_path.iterdir())
    assert run(cluster, tmp_path, "add_up") == Outcome("ok")


def test_a_cluster_that_cannot_be_built_says_so() -> None:
    broken = EmulatedCluster(ClusterSpec(nodes=1, ranks_per_node=1), preload=["no.such.module"])
    with pytest.raises(ClusterError, match=r"cannot import no\.such\.module(.|\n)*Traceback"):
        broken.__enter__()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for the temporary files of one process, short enough for sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def parent(tmp_path: Path, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    with lingering("emulated", tmp_path, TMPDIR=str(temporary)) as process:
        yield process


def names_of(owner: int) -> list[str]:
    return [name for name in netns.listnetns() if f"-{owner}-" in name]


@pytest.mark.system
def test_ranks_die_with_their_agent_and_ctrl_c_ends_everything(
    parent: subprocess.Popen[str], tmp_path: Path, temporary: Path
) -> None:
    pids = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("first/*.pids")}
    rank, agent, _ = pids["0"]
    os.kill(agent, signal.SIGKILL)
    wait_until_ended([rank, pids["1"][0]])
    wait_until(lambda: len(list(tmp_path.glob("second/*.pids"))) == 4)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=60) == -signal.SIGINT
    assert not any(is_running(pid) for pid in pids_below(tmp_path / "second"))
    assert names_of(parent.pid) == []
    assert list(temporary.iterdir()) == []
    assert "KeyboardInterrupt" in parent.stderr.read()


@pytest.mark.system
def test_everything_ends_by_itself_when_the_parent_is_killed(
    parent: subprocess.Popen[str], tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(names_of(parent.pid)) == 3
    folders = sorted(temporary.iterdir())
    assert len(folders) == 2  # the launch's, and the one of multiprocessing's sockets
    parent.kill()
    parent.wait()
    wait_until_ended(pids_below(tmp_path / "first"))
    assert len(names_of(parent.pid)) == 3
    assert sorted(temporary.iterdir()) == folders
    namespaces.remove_stale()
    assert names_of(parent.pid) == []
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with lifetimes.folder() as folder:
        assert list(temporary.iterdir()) == [folder]

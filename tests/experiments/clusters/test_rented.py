"""Rented nodes on this host, with a stand-in for ssh that starts everything here."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from experiments.clusters import node, rented
from experiments.clusters.allocation import Allocation, Ssh
from experiments.clusters.interface import ClusterError, LostNodeError, Outcome
from experiments.clusters.rented import RentedCluster
from experiments.records.cell import ClusterSpec
from tests.experiments.clusters.on_ranks import described, lingering, pids_below, run
from tests.experiments.planted import plant
from tests.experiments.waiting import is_running, wait_until, wait_until_ended
from tests.programs import written


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_of(*hosts: str) -> RentedCluster:
    """Nodes of two ranks each, which one process of theirs forks."""
    allocation = Allocation(Ssh(hosts), 2, head="127.0.0.1")
    return RentedCluster(allocation, allocation.spec.model_copy(update={"port": free_port()}))


def stand_in(folder: Path) -> Path:
    """A folder for the PATH: an ssh that runs its last argument here."""
    folder.mkdir()
    written(folder / "ssh", 'for last; do :; done\nexec sh -c "$last"')
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RentedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        folder = stand_in(tmp_path_factory.mktemp("stand-ins") / "bin")
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        patch.setenv("NCCL_DEBUG", "WARN")
        patch.setenv("NCCL_TOPO_FILE", "/x")
        plant(patch)
        with cluster_of("localhost", "localhost") as built:
            yield built


def test_what_a_rank_sees(cluster: RentedCluster, tmp_path: Path) -> None:
    for rank, each in enumerate(described(cluster, tmp_path)):
        assert (tmp_path / f"{rank}.ended").exists()
        seen = each["environment"]
        assert seen["FCDP_INTERFACE"] == seen["GLOO_SOCKET_IFNAME"] == "lo"
        assert seen["NCCL_SOCKET_IFNAME"] == "=lo"
        assert seen["NCCL_DEBUG"] == "WARN"


def test_the_rank_that_failed_first_is_named(cluster: RentedCluster, tmp_path: Path) -> None:
    """By its exception, or by its exit code, before the exceptions of those that have lost it."""
    raised = run(cluster, tmp_path, "fail", "raise and clean up", "3")
    assert (raised.state, raised.rank) == ("failed", 3)
    assert "ValueError: the cause of it all" in str(raised.error)
    killed = run(cluster, tmp_path, "fail", "SIGKILL", "0")
    assert killed == Outcome("failed", 0, "killed by signal SIGKILL")


def when_all_linger(folder: Path, act: Callable[[], None]) -> threading.Thread:
    """Start a thread that waits for all ranks' pids and acts."""

    def wait_and_act() -> None:
        wait_until(lambda: len(list(folder.glob("*.pids"))) == 4, 100)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def test_a_launch_that_does_not_end_is_ended(
    cluster: RentedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listens = []
    passed_s = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed_s[0], monotonic_ns=time.monotonic_ns
    )
    monkeypatch.setattr(rented, "time", clock)

    def look() -> None:
        for address in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as probe:
                listens.append(probe.connect_ex((address, cluster._port)) == 0)
        passed_s[0] = 100.0  # rather than to wait for it

    thread = when_all_linger(tmp_path, look)
    assert run(cluster, tmp_path, "linger", str(tmp_path), timeout_s=100).state == "timeout"
    thread.join()
    # The store is open at node 0's address only.
    assert listens == [True, False]
    # What the ranks had started in sessions of their own has ended too.
    assert len(pids_below(tmp_path)) == 12
    assert not any(map(is_running, pids_below(tmp_path)))


def test_a_taken_port_is_the_launchs_error(cluster: RentedCluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", cluster._port)):
        outcome = run(cluster, tmp_path, "add_up")
    assert outcome.state == "failed"
    assert "Address already in use; " in str(outcome.error)
    assert "FCDP_PORT=" in str(outcome.error)


def _launchers() -> list[psutil.Process]:
    """The stand-in's processes, which have become the shell, and then the program, of the node."""
    return [
        each
        for each in psutil.Process().children()
        if each.is_running() and "experiments.clusters.node" in " ".join(each.cmdline())
    ]


def test_a_launcher_that_ends_is_a_lost_node(cluster: RentedCluster, tmp_path: Path) -> None:
    def kill() -> None:
        moments.append(time.monotonic())
        # The first was started first.
        max(_launchers(), key=lambda process: process.pid).kill()

    moments: list[float] = []
    thread = when_all_linger(tmp_path, kill)
    with pytest.raises(LostNodeError, match=r"node 1, localhost, is lost: .* exit code -9"):
        run(cluster, tmp_path, "linger", str(tmp_path))
    thread.join()
    assert time.monotonic() - moments[0] < 50
    # Those of the killed node's ranks die with it; what they had started is Slurm's or sshd's.
    wait_until_ended([json.loads(p.read_text())[0] for p in tmp_path.glob("*.pids")])


def test_a_node_that_falls_silent_is_lost(
    cluster: RentedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rented, "SILENCE_S", 2 * node.BEAT_S)
    monkeypatch.setattr(rented, "_ENDING_S", 1.0)
    stopped: list[psutil.Process] = []

    def stop() -> None:
        stopped.append(max(_launchers(), key=lambda process: process.pid))
        stopped[0].suspend()

    thread = when_all_linger(tmp_path, stop)
    try:
        with pytest.raises(LostNodeError, match="nothing was heard of it for 10 s"):
            run(cluster, tmp_path, "linger", str(tmp_path))
    finally:
        thread.join()
    assert not stopped[0].is_running()


def test_nothing_outlives_a_killed_runner(tmp_path: Path) -> None:
    folder = stand_in(tmp_path / "bin")
    with lingering("rented", tmp_path, PATH=f"{folder}:{os.environ['PATH']}") as runner:
        runner.kill()
    wait_until_ended(pids_below(tmp_path / "first"))


@pytest.mark.usefixtures("privileged")  # to hide a folder from one node
def test_a_node_that_does_not_see_the_run_gets_its_cell_and_sends_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = tmp_path / "hidden"
    run_folder.mkdir()
    cell = run_folder / "cell.json"
    hide = f"mount -t tmpfs none {run_folder}; echo of an earlier run > {cell}"
    folder = tmp_path / "bin"
    folder.mkdir()
    written(folder / "ssh", f'for last; do :; done\nexec unshare --mount sh -c "{hide}; $last"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    cell.write_text("a cell, é", encoding="utf-8")
    with cluster_of("localhost", "localhost") as cluster:
        assert run(cluster, run_folder / "logs", "show_file", str(cell)) == Outcome("ok")
    texts = [(run_folder / "logs" / f"rank{rank}.log").read_text() for rank in range(4)]
    assert texts == ["a cell, é\n"] * 4


ANOTHER = node.Description(address="127.0.0.1", commit="another", network={}).model_dump_json()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no route >&2; exit 255", r"node 1, other, is lost: .* exit code 255:\nno route"),
        ("echo nonsense", "node 1, other, is lost: it said b'nonsense"),
        (f"cat <<'E'\n{ANOTHER}\nE", "other has commit another, the runner "),
    ],
    ids=["out of reach", "nonsense", "another commit"],
)
def test_a_node_that_cannot_take_part_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    written(tmp_path / "ssh", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match=message):
        cluster_of("localhost", "other").__enter__()


def test_a_launcher_and_an_interface_that_are_not_there_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(ClusterError, match="cannot start ssh: No such file"):
            cluster_of("localhost", "other").__enter__()
    monkeypatch.setenv("FCDP_INTERFACE", "ib7")
    with pytest.raises(LostNodeError, match="FCDP_INTERFACE: interface = 'ib7': allowed are"):
        cluster_of("localhost").__enter__()


def test_it_takes_no_other_shape_than_is_rented() -> None:
    allocation = Allocation(Ssh(("a", "b")), 2)
    with pytest.raises(ClusterError, match="3 nodes × 2 ranks are asked for, and 2 × 2 are rented"):
        RentedCluster(allocation, ClusterSpec(kind="rented", nodes=3, ranks_per_node=2))

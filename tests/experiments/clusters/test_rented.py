"""Rented nodes: two agents on this host, each a node of its own."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from experiments import provenance
from experiments.clusters import wire
from experiments.clusters.allocation import Allocation
from experiments.clusters.interface import ClusterError, LostNodeError, Outcome
from experiments.clusters.rented import RentedCluster, _Reception
from experiments.provenance import ROOT
from tests.experiments.clusters.rented_node import JOBS
from tests.experiments.waiting import wait_until, wait_until_ended

TOKEN = b"a token that only these tests know"
RANKS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def allocation(nodes: int = 2) -> Allocation:
    return Allocation(("127.0.0.1", free_port()), TOKEN, nodes, RANKS)


def cluster_of(allocation: Allocation, gathering_s: float = 200) -> RentedCluster:
    spec = allocation.spec.model_copy(update={"port": free_port()})
    return RentedCluster(allocation, spec, gathering_s)


def start(
    allocation: Allocation, node: int, *before: str, **settings: str
) -> subprocess.Popen[str]:
    host, port = allocation.head
    module = "tests.experiments.clusters.rented_node"
    variables = {
        "FCDP_HEAD": f"{host}:{port}",
        "FCDP_TOKEN": allocation.token.decode(),
        "FCDP_NODES": str(allocation.nodes),
        "FCDP_RANKS_PER_NODE": str(allocation.ranks_per_node),
        **settings,
    }
    return subprocess.Popen(
        [*before, sys.executable, "-m", module, str(node)],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RentedCluster]:
    with ExitStack() as stack:
        rented = allocation()
        for node in range(2):
            stack.callback(end, start(rented, node, NCCL_DEBUG="WARN", NCCL_TOPO_FILE="/x"))
        yield stack.enter_context(cluster_of(rented))


def run(
    cluster: RentedCluster, logs: Path, function: str, *arguments: str, timeout_s: float = 60
) -> Outcome:
    return cluster.run(
        f"{JOBS}:{function}", arguments, logs=logs, environment={}, timeout_s=timeout_s
    )


def pids_below(directory: Path) -> list[int]:
    """Ranks and their agents, but not the ranks' own children."""
    texts = [path.read_text() for path in directory.glob("*.pids")]
    return [pid for text in texts for pid in json.loads(text)[:2]]


def test_ranks_of_both_nodes_meet(cluster: RentedCluster, tmp_path: Path) -> None:
    for _ in range(2):
        assert run(cluster, tmp_path, "add_up") == Outcome("ok")
    logs = ["node0.log", "node1.log", *(f"rank{rank}.log" for rank in range(4))]
    assert sorted(path.name for path in tmp_path.iterdir()) == logs


def test_what_a_rank_sees(cluster: RentedCluster, tmp_path: Path) -> None:
    outcome = cluster.run(
        f"{JOBS}:describe",
        [str(tmp_path)],
        logs=tmp_path / "logs",
        environment={"GIVEN": "$value"},
        timeout_s=60,
    )
    assert outcome == Outcome("ok")
    for rank in range(4):
        text = (tmp_path / f"{rank}.json").read_text()
        assert TOKEN.decode() not in text
        seen = json.loads(text)["environment"]
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(rank), "4")
        assert (seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"]) == (str(rank % 2), "2")
        assert seen["GROUP_RANK"] == str(rank // 2)
        assert seen["FCDP_INTERFACE"] == seen["GLOO_SOCKET_IFNAME"] == "lo"
        assert seen["NCCL_SOCKET_IFNAME"] == "=lo"
        assert seen["GIVEN"] == "$value"


def test_the_network_is_described_without_secrets_and_not_limited(cluster: RentedCluster) -> None:
    assert cluster.evidence == "measured"
    described = cluster.shape(None)
    assert described["counted_interface"] == "lo"
    assert described["nccl"] == {"NCCL_DEBUG": "WARN"}
    assert TOKEN.decode() not in str(described)
    with pytest.raises(ClusterError, match="not limited"):
        cluster.shape(10**6)


@pytest.mark.parametrize(
    ("how", "rank", "state", "error"),
    [
        ("raise", 0, "failed", "ValueError: the cause of it all"),
        ("raise and clean up", 3, "failed", "ValueError: the cause of it all"),
        ("host memory", 1, "oom", "DefaultCPUAllocator"),
        ("vanish", 2, "failed", "ended with exit code 0 before its function returned"),
        ("SIGKILL", 0, "failed", "killed by signal SIGKILL"),
        ("SIGKILL", 3, "failed", "killed by signal SIGKILL"),
    ],
)
def test_the_rank_that_failed_first_is_named(
    cluster: RentedCluster, tmp_path: Path, how: str, rank: int, state: str, error: str
) -> None:
    started = time.monotonic()
    outcome = run(cluster, tmp_path, "fail", how, str(rank))
    assert (outcome.state, outcome.rank) == (state, rank), outcome.error
    assert error in str(outcome.error)
    assert time.monotonic() - started < 60


def test_a_job_that_does_not_end_is_ended(cluster: RentedCluster, tmp_path: Path) -> None:
    assert run(cluster, tmp_path, "linger", str(tmp_path), timeout_s=4) == Outcome(
        "timeout", None, "did not end within 4 s"
    )
    pids = pids_below(tmp_path)
    assert pids
    wait_until_ended(pids)
    assert run(cluster, tmp_path, "add_up") == Outcome("ok")


def test_temporary_files_are_the_nodes_own_and_end_with_the_job(
    cluster: RentedCluster, tmp_path: Path
) -> None:
    assert run(cluster, tmp_path, "leave_file", str(tmp_path)).state == "failed"
    files = [Path((tmp_path / f"{rank}.path").read_text()) for rank in range(4)]
    assert {Path(tempfile.gettempdir()) in file.parents for file in files} == {True}
    folders = [file.parent for file in files]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    wait_until(lambda: not any(folder.exists() for folder in folders))


def test_a_lost_node_ends_the_run_and_another_one_takes_its_place(tmp_path: Path) -> None:
    rented = allocation()
    with ExitStack() as stack:
        nodes = [start(rented, node) for node in range(2)]
        for node in nodes:
            stack.callback(end, node)
        with cluster_of(rented) as cluster:
            threading.Thread(target=_kill_when_ranks_run, args=(nodes[1], tmp_path)).start()
            started = time.monotonic()
            with pytest.raises(LostNodeError, match=r"node 1 at 127\.0\.0\.1 is lost"):
                run(cluster, tmp_path, "linger", str(tmp_path))
            assert time.monotonic() - started < 60
        wait_until_ended(pids_below(tmp_path))
        # Node 0 waits for the next runner; it and a new node 1 go on.
        stack.callback(end, start(rented, 1))
        with cluster_of(rented) as cluster:
            assert run(cluster, tmp_path, "add_up") == Outcome("ok")


def _kill_when_ranks_run(node: subprocess.Popen[str], directory: Path) -> None:
    wait_until(lambda: len(list(directory.glob("*.pids"))) == 4)
    node.kill()


@pytest.mark.usefixtures("privileged")  # to hide a folder from one node
def test_a_node_that_does_not_see_the_run_gets_its_cell_and_sends_its_logs(tmp_path: Path) -> None:
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs fcdp "$0" && exec "$@"')
    folders = [tmp_path / "hidden from 0", tmp_path / "hidden from 1"]
    rented = allocation()
    with ExitStack() as stack:
        for node, folder in enumerate(folders):
            folder.mkdir()
            stack.callback(end, start(rented, node, *hidden, str(folder)))
        cluster = stack.enter_context(cluster_of(rented))
        cell = folders[1] / "cell.json"
        cell.write_text("a cell")
        assert run(cluster, folders[1] / "logs", "show_file", str(cell)) == Outcome("ok")
        texts = [(folders[1] / "logs" / f"rank{rank}.log").read_text() for rank in range(4)]
        assert texts == ["a cell\n"] * 4
        # Node 0's rank 0 writes what is measured: it must see where.
        outcome = run(cluster, folders[0] / "logs", "add_up")
        assert outcome.state == "failed"
        assert "start its agent on the runner's machine" in str(outcome.error)


def hello(**changes: object) -> wire.Hello:
    fields = {
        "node": 0,
        "ranks": RANKS,
        "address": "127.0.0.1",
        "interface": "lo",
        "commit": provenance.gather().commit,
        "network": {},
    }
    return wire.Hello.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 8}, "node 1 at 127.0.0.1 runs 8 ranks, the runner asks for 2"),
        ({"node": 2}, "allowed are nodes 0 to 1"),
        ({"node": 0}, "an agent of that node is here already"),
        ({"commit": "another"}, "has commit another"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    rented = allocation()

    def come() -> None:
        for each in (hello(), hello(**{"node": 1, **changes})):
            channel = _connect(rented)
            channel.send(each)
            answers.append(channel.expect(wire.Answer))

    answers: list[wire.Answer] = []
    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(ClusterError, match=message):
        cluster_of(rented).__enter__()
    thread.join()
    assert answers[0].refusal is None
    assert message in str(answers[1].refusal)


def _connect(rented: Allocation) -> wire.Channel:
    deadline = time.monotonic() + 60
    while True:
        try:
            return wire.connect(rented.head, rented.token)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_strangers_are_not_let_in_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_ANSWER_S", 90)
    rented = allocation(nodes=1)
    stranger = Allocation(rented.head, b"another token of the same length..", 1, RANKS)

    def come() -> None:
        with socket.socket() as silent:
            while silent.connect_ex(rented.head) != 0:
                time.sleep(0.01)
            with pytest.raises(wire.Lost, match="no proof of the token"):
                _connect(stranger)
            channel = _connect(rented)
            channel.send(hello())
            channel.expect(wire.Answer)

    thread = threading.Thread(target=come)
    thread.start()
    started = time.monotonic()
    with cluster_of(rented):
        assert time.monotonic() - started < 60
        # Nobody listens any more once all nodes are here.
        with pytest.raises(ConnectionRefusedError):
            wire.connect(rented.head, rented.token)
    thread.join()


def test_missing_nodes_are_named() -> None:
    with pytest.raises(ClusterError, match="no agent of node 0, 1 after 0.1 s"):
        cluster_of(allocation(), gathering_s=0.1).__enter__()


def test_an_address_of_another_machine_is_named() -> None:
    rented = Allocation(("192.0.2.1", free_port()), TOKEN, 1, RANKS)
    with pytest.raises(ClusterError, match=r"cannot listen at FCDP_HEAD = 192\.0\.2\.1:"):
        cluster_of(rented).__enter__()


def test_it_listens_at_its_own_address_only() -> None:
    rented = allocation(nodes=1)
    with _Reception(rented), socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", rented.head[1])) == errno.ECONNREFUSED
        assert probe.connect_ex(rented.head) == 0

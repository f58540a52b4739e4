import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyroute2 import netns

from baselines.links import transmitted_bytes
from experiments.clusters import lifetimes, namespaces
from experiments.clusters.emulated import INTERFACE, TO_GROUPS, Network
from experiments.clusters.interface import ClusterError
from experiments.records.abilities import HIGHEST_RATE, LOWEST_RATE

pytestmark = pytest.mark.usefixtures("privileged")


def goodput(network: Network, sender: int, receiver: int) -> float:
    """Bits a second of payload of one TCP stream, once it runs."""
    address = network.addresses[receiver]
    server = namespaces.call_in(network.nodes[receiver], lambda: socket.create_server((address, 0)))
    client = namespaces.call_in(
        network.nodes[sender], lambda: socket.create_connection(server.getsockname())
    )
    with server, client, ThreadPoolExecutor(max_workers=1) as executor:
        accepted, _ = server.accept()
        with accepted:
            sending = executor.submit(_send_until_closed, client)
            _receive_for(accepted, 0.3)  # the free burst, and TCP's start
            started = time.monotonic()
            received = _receive_for(accepted, 0.5)
            elapsed = time.monotonic() - started
        sending.result()
    return 8 * received / elapsed


def _send_until_closed(client: socket.socket) -> None:
    block = bytes(1 << 18)
    try:
        while True:
            client.sendall(block)
    except OSError:
        pass


def _receive_for(accepted: socket.socket, seconds: float) -> int:
    received, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        received += len(accepted.recv(1 << 18))
    return received


def test_links_between_groups_have_a_limit_and_counters_of_their_own() -> None:
    fast, slow = 200_000_000, 20_000_000
    with Network(4, groups=2) as network:
        settings = network.shape(fast, slow)
        assert settings["rate_bits_per_s"] == fast
        assert settings["to_groups"]["rate_bits_per_s"] == slow
        # Of another sender each: what waits in a queue leaves after its stream has ended.
        for way, rate, link in (((0, 1), fast, INTERFACE), ((3, 0), slow, TO_GROUPS)):
            before = _sent(network, way[0])
            # One attempt must do: a stall of this machine spoils some, a wrong rate all.
            attempts = (goodput(network, *way) for _ in range(20))
            assert any(each == pytest.approx(rate, rel=0.07) for each in attempts)
            sent = {name: count - before[name] for name, count in _sent(network, way[0]).items()}
            assert sent.pop(link) > rate / 8 / 2
            assert max(sent.values()) < 1000, "who has which address is asked, and no more"
        lifted = network.shape(None)
        assert lifted["qdisc"] is lifted["to_groups"]["qdisc"] is None


def _sent(network: Network, node: int) -> dict[str, int]:
    def read() -> dict[str, int]:
        return {name: transmitted_bytes(name) for name in network.interfaces}

    return namespaces.call_in(network.nodes[node], read)


def test_what_cannot_be_had_is_refused(network: Network) -> None:
    for rate in (0, -1, LOWEST_RATE - 1, HIGHEST_RATE + 1):
        with pytest.raises(ValueError, match=f"inter_bandwidth_bits_per_s = {rate}: allowed are"):
            network.shape(rate)


def test_nothing_appears_in_the_host_and_nothing_stays_of_what_runs_inside() -> None:
    before = os.listdir("/sys/class/net")
    started: list[subprocess.Popen[bytes]] = []
    with Network(3) as built:
        assert os.listdir("/sys/class/net") == before
        assert set(built.nodes) < set(netns.listnetns())
        first = built.nodes[0]
        namespaces.call_in(first, lambda: started.append(subprocess.Popen(["sleep", "600"])))
        assert namespaces.processes(first) == [started[0].pid]
    assert started[0].wait(timeout=60) == -signal.SIGKILL
    assert not set(built.nodes) & set(netns.listnetns())
    assert os.listdir("/sys/class/net") == before


def test_a_network_that_cannot_be_built_leaves_nothing() -> None:
    network = Network(2)
    namespaces.create(network.nodes[1])
    own = network.nodes[1].removesuffix("node1")  # others' come and go beside these
    with pytest.raises(ClusterError, match=network.nodes[1]):
        network.__enter__()
    assert not [name for name in netns.listnetns() if name.startswith(own)]


def test_a_namespace_is_stale_whose_owners_pid_was_given_away_and_no_other(
    network: Network,
) -> None:
    """Not those of others, of a live owner, and of other namespaces of pids."""
    scope, pid, started, cluster = lifetimes.new_prefix().split("-")[1:]
    stale = f"fcdp-{scope}-{pid}-{int(started) - 1}-{cluster}-node0"
    others = [f"fcdp-1-{2**22 + 1}-1-0-node0", f"other-{os.getpid()}-node0"]
    try:
        for name in (stale, *others):
            namespaces.create(name)
        namespaces.remove_stale()
        left = {*netns.listnetns()}
        assert stale not in left
        assert {*others, *network.nodes} <= left
    finally:
        for name in others:
            namespaces.remove(name)

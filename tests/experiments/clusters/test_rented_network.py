"""Rented nodes with a network between them: bytes that cross it, and a node that falls silent.

The nodes are network namespaces, as of the emulated cluster, but everything in them is what runs on
real ones: agents that connect to the runner at its address.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from experiments.clusters import namespaces, wire
from experiments.clusters.allocation import Allocation
from experiments.clusters.interface import LostNodeError, Outcome
from experiments.clusters.network import INTERFACE, Network
from experiments.clusters.rented import RentedCluster
from tests.experiments.clusters.test_rented import (
    RANKS,
    TOKEN,
    end,
    pids_below,
    run,
    start,
)
from tests.experiments.waiting import wait_until_ended

pytestmark = pytest.mark.usefixtures("privileged")


@pytest.fixture(scope="module")
def network(privileged: None) -> Iterator[Network]:
    with Network(2) as built:
        yield built


@pytest.fixture(scope="module")
def cluster(network: Network) -> Iterator[RentedCluster]:
    """The runner is on node 0; it notices a silent node in seconds."""
    quick = {
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 2,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 2000,
    }
    allocation = Allocation((network.addresses[0], 29400), TOKEN, 2, RANKS)
    rented = RentedCluster(allocation, allocation.spec)
    with ExitStack() as stack:
        for number, name in enumerate(network.nodes):
            inside = ("nsenter", f"--net=/run/netns/{name}")
            stack.callback(end, start(allocation, number, *inside))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(wire, "_KEEP_ALIVE", wire._KEEP_ALIVE | quick)
        namespaces.call_in(network.nodes[0], rented.__enter__)
        stack.callback(rented.__exit__, None, None, None)
        yield rented


def test_the_bytes_of_a_node_are_those_it_sends(cluster: RentedCluster, tmp_path: Path) -> None:
    assert cluster.shape(None)["counted_interface"] == INTERFACE
    assert run(cluster, tmp_path, "send", "5", str(tmp_path)) == Outcome("ok")
    sent = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    # Rank 0 sends to rank 3, on the other node.
    assert sent[0] == pytest.approx(5e6, rel=0.02)
    assert sent[3] < 0.05 * 5e6


def test_a_node_that_falls_silent_is_lost(
    cluster: RentedCluster, network: Network, tmp_path: Path
) -> None:
    moments = []

    def unplug() -> None:
        while len(list(tmp_path.glob("*.pids"))) < 4:
            time.sleep(0.01)
        moments.append(time.monotonic())
        with IPRoute(netns=network.nodes[1]) as route:
            (index,) = route.link_lookup(ifname=INTERFACE)
            route.link("set", index=index, state="down")

    threading.Thread(target=unplug).start()
    with pytest.raises(LostNodeError, match=r"node 1 at 198\.18\.0\.2 is lost"):
        run(cluster, tmp_path, "linger", str(tmp_path))
    assert time.monotonic() - moments[0] < 50
    cluster.__exit__(None, None, None)
    on_node_0 = [json.loads((tmp_path / f"{rank}.pids").read_text())[0] for rank in range(RANKS)]
    wait_until_ended(on_node_0)
    assert len(pids_below(tmp_path)) == 8

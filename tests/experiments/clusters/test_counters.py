import socket
from pathlib import Path

import pytest

from baselines import links
from baselines.links import transmitted_bytes
from experiments.clusters import namespaces
from experiments.clusters.emulated import INTERFACE, Network
from tests.experiments.waiting import wait_until


def test_counts_what_leaves_the_callers_node(network: Network) -> None:
    packets, size = 100, 5000
    # Ethernet, IPv4 and UDP headers.
    expected = packets * (size + 14 + 20 + 8)

    def send(address: str, count: int, expected: int) -> int:
        before = transmitted_bytes(INTERFACE)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(count):
                sender.sendto(bytes(size), (address, 9))
        # On a busy machine they still wait for the other node's hardware address.
        wait_until(lambda: transmitted_bytes(INTERFACE) - before >= expected)
        return transmitted_bytes(INTERFACE) - before

    there, here = network.addresses[1], network.addresses[0]
    # ARP is out of the way with the first one.
    assert namespaces.call_in(network.nodes[0], lambda: send(there, 1, size)) >= size
    assert namespaces.call_in(
        network.nodes[0], lambda: send(there, packets, expected)
    ) == pytest.approx(expected, abs=500)
    # What stays inside the node does not count.
    assert namespaces.call_in(network.nodes[0], lambda: send(here, packets, 0)) < 500


def test_an_infiniband_adapter_counts_words_on_all_of_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for port, words in (("1", 250), ("2", 50)):
        folder = tmp_path / "mlx5_0/ports" / port / "counters"
        folder.mkdir(parents=True)
        (folder / "port_xmit_data").write_text(f"{words}\n")
    monkeypatch.setattr(links, "_INFINIBAND", tmp_path)
    assert transmitted_bytes("mlx5_0") == 4 * 300
    with pytest.raises(ValueError, match=r"interface = 'mlx5_1': allowed are .*lo.*mlx5_0"):
        transmitted_bytes("mlx5_1")

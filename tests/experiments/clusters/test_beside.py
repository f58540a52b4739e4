"""Processes beside the ranks: on machines of their own, limited like nodes, ended with them."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pyroute2 import IPRoute, netns

from baselines.description import ExtraProcess
from experiments.clusters import namespaces
from experiments.clusters.emulated import EmulatedCluster, Network
from experiments.clusters.interface import Launch, Outcome
from experiments.records.cell import ClusterSpec

pytestmark = pytest.mark.usefixtures("privileged")

HERE = "tests.experiments.clusters.test_beside"
MBIT = 10**6


def _write_variables(folder: str, name: str) -> None:
    names = ("FCDP_SWITCH", "FCDP_SERVER", "FCDP_RUN_SECRET", "WORLD_SIZE")
    variables = {key: os.environ.get(key) for key in names}
    namespace = os.readlink("/proc/thread-self/ns/net")
    (Path(folder) / f"{name}.draft").write_text(json.dumps({**variables, "namespace": namespace}))
    (Path(folder) / f"{name}.draft").rename(Path(folder) / name)


def on_ranks(folder: str) -> None:
    """Write down a rank's variables; end when all others have written theirs."""
    _write_variables(folder, f"rank{os.environ['RANK']}")
    while len([*Path(folder).glob("*[0-9h]")]) < 3:
        time.sleep(0.01)


def as_switch() -> None:
    """Write down the process's variables, in the folder that one of them names."""
    _write_variables(os.environ["TEST_FOLDER"], "switch")
    time.sleep(600)


def as_broken() -> None:
    raise ValueError("no file to be had")


def wait_for_ever(_: str) -> None:
    time.sleep(600)


def test_they_share_a_secret_with_the_ranks_and_end_with_them(tmp_path: Path) -> None:
    said, logs = tmp_path / "said", tmp_path / "logs"
    said.mkdir()
    launch = Launch(
        entry=f"{HERE}:on_ranks",
        arguments=(str(said),),
        logs=logs,
        environment={"TEST_FOLDER": str(said)},
        timeout_s=60,
        extra=(ExtraProcess("switch", f"{HERE}:as_switch", in_network=True),),
    )
    with EmulatedCluster(ClusterSpec(nodes=2, ranks_per_node=1), preload=["torch"]) as cluster:
        assert cluster.run(launch) == Outcome("ok")
        # One that fails ends the ranks, which else would wait for it.
        broken = (ExtraProcess("server", f"{HERE}:as_broken"),)
        began = time.monotonic()
        entry = f"{HERE}:wait_for_ever"
        outcome = cluster.run(replace(launch, entry=entry, logs=tmp_path / "failed", extra=broken))
        assert (outcome.state, outcome.rank) == ("failed", None)
        error = str(outcome.error)
        assert error.startswith("server: ")
        assert "ValueError: no file to be had" in error
        assert time.monotonic() - began < launch.timeout_s / 2
        names = [name for name in netns.listnetns() if f"-{os.getpid()}-" in name]
        assert not any("beside" in name for name in names)
    by_process = {path.name: json.loads(path.read_text()) for path in said.iterdir()}
    assert by_process.keys() == {"rank0", "rank1", "switch"}
    assert len({each.pop("namespace") for each in by_process.values()}) == 3
    assert by_process["switch"] == by_process["rank0"] == by_process["rank1"] | {"WORLD_SIZE": "2"}
    secret = by_process["switch"]["FCDP_RUN_SECRET"]
    assert len(bytes.fromhex(secret)) == 32
    assert all(secret not in path.read_text() for path in logs.iterdir())


def _rates(namespace: str) -> dict[str, int]:
    """Bits per second of each interface that a token bucket limits."""
    with IPRoute(netns=namespace) as route:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in route.get_links()}
        return {
            names[q["index"]]: 8 * q.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]
            for q in route.get_qdiscs()
            if q.get_attr("TCA_KIND") == "tbf"
        }


def test_a_part_of_the_network_is_limited_by_the_links_of_all_others(privileged: None) -> None:
    with Network(2) as network:
        network.add("switch", in_network=True)
        network.add("server", in_network=False)
        network.shape(MBIT)
        limited = {"fcdp0": MBIT}
        beside = {name: _rates(namespace) for name, (namespace, _) in network.beside.items()}
        assert beside == {"switch": {}, "server": limited}
        assert [_rates(node) for node in network.nodes] == [limited, limited]
        assert _rates(network._switch) == {"fcdp0-0": MBIT, "fcdp0-1": MBIT, "fcdp0-server": MBIT}
        gone = [namespace for namespace, _ in network.beside.values()]
        network.withdraw()
        assert not set(gone) & set(netns.listnetns())
        network.shape(MBIT)
        assert _rates(network._switch) == {}
        assert [_rates(node) for node in network.nodes] == [limited, limited]
        assert namespaces.processes(network.nodes[0]) == []

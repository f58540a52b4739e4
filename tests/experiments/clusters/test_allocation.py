"""Rented nodes as the launcher's variables describe them."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.clusters.allocation import Allocation, visible_gpus
from experiments.clusters.interface import ClusterError
from experiments.records import ClusterSpec

GOOD = {
    "FCDP_HEAD": "10.0.0.1:29400",
    "FCDP_TOKEN": "secret" * 8,
    "FCDP_NODES": "4",
    "FCDP_RANKS_PER_NODE": "8",
}


def test_the_variables_make_a_cluster() -> None:
    allocation = Allocation.from_env(GOOD)
    assert allocation.head == ("10.0.0.1", 29400)
    assert allocation.spec == ClusterSpec(kind="rented", nodes=4, ranks_per_node=8)
    assert "secret" not in repr(allocation)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FCDP_HEAD", "10.0.0.1", "FCDP_HEAD = '10.0.0.1': allowed is HOST:PORT"),
        ("FCDP_HEAD", "10.0.0.1:80", "free port from 1024"),
        ("FCDP_NODES", "none", "FCDP_NODES = 'none': allowed are whole numbers from 1"),
        ("FCDP_NODES", "0", "FCDP_NODES = '0'"),
        ("FCDP_RANKS_PER_NODE", "-1", "FCDP_RANKS_PER_NODE = '-1'"),
    ],
)
def test_a_mistake_names_the_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Allocation.from_env(GOOD | {name: value})


def test_a_short_token_is_refused_and_not_shown() -> None:
    with pytest.raises(ClusterError, match="FCDP_TOKEN: allowed are 32 characters") as raised:
        Allocation.from_env(GOOD | {"FCDP_TOKEN": "hunter2"})
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(("chosen", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0)])
def test_ranks_are_gpus_unless_said(tmp_path: Path, chosen: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, tmp_path) == count


def test_without_gpus_the_ranks_must_be_said() -> None:
    without = {k: v for k, v in GOOD.items() if k != "FCDP_RANKS_PER_NODE"}
    with pytest.raises(ClusterError, match="FCDP_RANKS_PER_NODE is not set and this machine"):
        Allocation.from_env({**without, "CUDA_VISIBLE_DEVICES": ""})

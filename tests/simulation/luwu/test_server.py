"""LuWu's server by what a user gives."""

from __future__ import annotations

import pytest

from simulation.luwu import like, nominal
from tests.simulation.workloads import hardware


def test_drives_add_up_and_the_link_reaches_what_others_do() -> None:
    cluster = hardware()
    found = nominal(100e9, 12, cluster)
    assert found.disk_read_bytes_per_s == pytest.approx(78e9)
    assert found.disk_write_bytes_per_s == pytest.approx(40.8e9)
    assert found.link_bytes_per_s == pytest.approx(0.8 * 12.5e9)


def test_without_one_it_is_like_a_node() -> None:
    cluster = hardware()
    assert like(cluster).link_bytes_per_s == cluster.inter_bytes_per_s
    assert like(cluster).disk_read_bytes_per_s == cluster.disk_read_bytes_per_s

"""Where units are kept, against the library's policies; those of one tier are known without it."""

from __future__ import annotations

import pytest

from simulation import memory
from simulation.units import layout
from simulation.workload import Workload
from tests.simulation.workloads import paper_cluster


@pytest.mark.parametrize("policy", ["none", "device", "host", "disk"])
def test_one_tier_is_what_the_library_decides(
    policy: str, monkeypatch: pytest.MonkeyPatch, workload: Workload
) -> None:
    hardware = paper_cluster(4, 1e9)
    units = layout(workload, workload.schedule, hardware.nodes, hardware.ranks_per_node)
    own = memory._by_policy(policy, workload, workload.schedule, units, hardware)
    monkeypatch.setattr(memory, "_ONE_TIER", {})
    assert own == memory._by_policy(policy, workload, workload.schedule, units, hardware)


@pytest.fixture
def workload() -> Workload:
    from simulation.models import shape

    return Workload(
        strategy="fcdp", model=shape("gpt-10b", 512), sequence_length=512, micro_batch=1
    )

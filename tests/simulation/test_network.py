"""The network as it is: fabrics, oversubscription, reductions in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.hardware import cluster
from simulation.models import shape
from simulation.prediction import predict
from simulation.workload import Workload

HARDWARE = cluster("a100-80gb", nodes=4, ranks_per_node=8, inter_bits_per_s=1e10)


@pytest.fixture
def workload() -> Workload:
    model = shape("gpt-10b", 512)
    return Workload(strategy="fcdp", model=model, sequence_length=512, micro_batch=1)


@pytest.mark.parametrize("strategy", ["fsdp2", "fcdp", "fsdp2-hsdp", "ddp", "deepspeed-zero3"])
def test_reductions_in_fp32_send_twice_as_much(workload: Workload, strategy: str) -> None:
    same = replace(workload, strategy=strategy)
    twice = replace(same, reduce_dtype="fp32")
    sent = [predict(one, HARDWARE).moved_bytes["inter_node"] for one in (same, twice)]
    assert sent[1]["reduce"] == pytest.approx(2 * sent[0]["reduce"])
    assert sent[1].get("forward") == sent[0].get("forward")


def test_fabrics_differ_in_latency_and_oversubscription_in_bandwidth(workload: Workload) -> None:
    seconds = {
        fabric: predict(workload, HARDWARE.over(fabric, 1)).step_seconds
        for fabric in ("infiniband", "roce", "tcp")
    }
    assert seconds["infiniband"] < seconds["roce"] < seconds["tcp"]
    shared = HARDWARE.over("tcp", 4)
    assert shared.inter_bytes_per_s == HARDWARE.inter_bytes_per_s / 4
    assert predict(workload, shared).step_seconds > 3 * seconds["tcp"]


def test_what_no_network_is() -> None:
    with pytest.raises(ValueError, match="fabric = 'string': allowed are tcp, roce"):
        HARDWARE.over("string", 1)
    with pytest.raises(ValueError, match=r"oversubscription = 0\.5: must be 1 or more"):
        HARDWARE.over("tcp", 0.5)

"""Frozen parameters in fp32, bf16 and four bits: what they take, and what their use costs."""

from dataclasses import replace
from typing import Any

import pytest

from simulation.prediction import needed, predict
from simulation.workload import Workload
from tests.simulation.workloads import paper_cluster, workload

HARDWARE = paper_cluster(2)


def lora(strategy: str, frozen_dtype: str) -> Workload:
    return workload(strategy, lora=True, large=True, micro_batch=1, frozen_dtype=frozen_dtype)


@pytest.mark.parametrize(("strategy", "sharers"), [("ddp", 1), ("fsdp2-hsdp", 8), ("fcdp", 16)])
def test_a_bf16_base_takes_two_bytes_and_adapters_four(strategy: str, sharers: int) -> None:
    wide, base = (lora(strategy, frozen_dtype=kind) for kind in ("fp32", "bf16"))
    four, two = (needed(one, HARDWARE).device for one in (wide, base))
    assert four["parameters"] == pytest.approx(4 * base.parameters / sharers)
    assert two["parameters"] == pytest.approx((2 * base.frozen + 4 * base.trained) / sharers)
    if strategy == "ddp":  # whose replicas need no copies of such a base
        assert four["gathered"] == pytest.approx(2 * base.parameters)
        assert two.get("gathered", 0.0) < 0.01 * base.parameters


#: Bytes per weight of a block's matrices, by type: what ranks shard, what a gather sends, and what
#: each rank has besides.
SCALES = 0.127 / 8
PACKED = {
    "fp8": (2.0, 1.0, 0.0),
    "nf4": (0.5 + SCALES, 0.5 + SCALES, 0.0),
    "bnb-4bit": (0.5, 0.5, SCALES),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    ("strategy", "sharers", "place"),
    [("ddp", 1, "device"), ("fcdp", 16, "device"), ("fsdp2-hsdp-offload", 1, "host")],
)
def test_a_packed_base_takes_its_librarys_bytes_but_for_embeddings(
    kind: str, strategy: str, sharers: int, place: str
) -> None:
    """Scales that nobody sends are on each device; a node's ranks have shards on the host."""
    taken, usual = (needed(lora(strategy, frozen_dtype=each), HARDWARE) for each in (kind, "bf16"))
    model = lora(strategy, frozen_dtype=kind).model
    packed = model.layers * sum(matrix.weights for matrix in model.matrices)
    sharded, _, besides = PACKED[kind]
    expected = getattr(usual, place)["parameters"] - (2 - sharded) * packed / sharers
    assert getattr(taken, place)["parameters"] == pytest.approx(expected, rel=1e-3)
    assert taken.device.get("scales", 0.0) == besides * packed


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_base_is_cached_as_it_is(kind: str) -> None:
    base, narrow = (lora("fcdp", frozen_dtype=each) for each in ("bf16", kind))
    packed = base.model.layers * sum(matrix.weights for matrix in base.model.matrices)
    ratio = 1 - packed / base.model.parameters * (1 - PACKED[kind][1] / 2)
    kept = [needed(one, HARDWARE).host["cache"] for one in (base, narrow)]
    assert kept[1] == pytest.approx(ratio * kept[0], rel=0.01)


def test_four_bits_cost_a_pass() -> None:
    base, narrow = (predict(lora("fsdp2", frozen_dtype=kind), HARDWARE) for kind in ("bf16", "nf4"))
    busy = [one.busy["compute"] * one.step_seconds for one in (base, narrow)]
    assert busy[1] > busy[0]


@pytest.mark.parametrize("strategy", ["fsdp2", "fcdp", "ddp", "deepspeed-zero3"])
@pytest.mark.parametrize("kind", ["bf16", "nf4"])
def test_what_is_all_trained_has_no_base(strategy: str, kind: Any) -> None:
    usual = workload(strategy, large=True)
    quantised = replace(usual, frozen_dtype=kind)
    assert needed(usual, HARDWARE) == needed(quantised, HARDWARE)
    assert predict(usual, HARDWARE).step_seconds == predict(quantised, HARDWARE).step_seconds

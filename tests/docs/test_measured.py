"""Tables of times and counts: exact coding near its entropy, and host time.

The number of collectives does not grow with the number of nodes.
"""

import pytest
import torch
import torch.distributed as dist

from examples.differences.bits import _entropy
from scripts import coding_speed, host_cost, readme
from tests.ranks import Pools, on_ranks


def test_each_case_is_coded_and_shown() -> None:
    record = coding_speed.measured(2**14, rounds=2)
    bits = {row["case"]: row["bits"] for row in record["rows"]}
    assert bits.keys() == {row["case"] for row in readme.committed("coding-speed")["rows"]}
    coded_bits = [bits[f"bf16 after a step at {rate:g}, entropy"] for rate in coding_speed.RATES]
    assert coded_bits == sorted(coded_bits, reverse=True)
    assert bits["bf16 gradients, exponents"] < 11.2
    assert all(
        f"| {name} | {count:.2f} |" in coding_speed.table(record) for name, count in bits.items()
    )


def test_gathers_are_near_the_entropy_of_the_same_steps_and_reductions_are_coded() -> None:
    rows = readme.committed("difference-bits")["rows"]
    assert {1e-5, 3e-5, 1e-6} < {row["learning_rate"] for row in rows}
    for row in rows:
        # At the lowest rate each of the smaller model's ten messages per step has 4 kB.
        most = 1.25 if row["learning_rate"] == 1e-6 and row["parameters"] < 1e7 else 1.2
        assert 1 < row["gathers"][1] / row["entropy"][1] <= most
        assert row["reductions"][1] <= 11.2


@on_ranks(2)
def test_the_entropy_is_that_of_all_ranks_words() -> None:
    assert _entropy(torch.tensor([dist.get_rank()] * 8)) == 1.0
    assert _entropy(torch.tensor([0, 0, 0, 65535])) == pytest.approx(0.811278)


COUNTS = {
    "gather, stale": {"inter-node": 1, "intra-node": 1},
    "gather, fresh": {"intra-node": 1},
    "reduce": {"inter-node": 1, "intra-node": 1},
    "FSDP2 gather": {"all ranks": 1},
    "FSDP2 reduce": {"all ranks": 1},
}


def test_the_record_holds_what_is_counted_on_all_shapes() -> None:
    rows = readme.committed("host-cost")["rows"]
    assert {(row["nodes"], row["ranks_per_node"]) for row in rows} == {*host_cost.SHAPES}
    assert len(rows) == len(host_cost.SHAPES) * len(COUNTS) * 2
    for row in rows:
        assert row["collectives"] == COUNTS[row["path"]]


def counted(nodes: int, detect_writes: bool) -> dict[str, host_cost.Counts]:
    dist.destroy_process_group()
    counts = host_cost.counted(nodes, 8, detect_writes=detect_writes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return counts


def test_a_gather_and_a_reduction_are_one_collective_per_direction_on_any_nodes() -> None:
    pools = Pools()  # a process of its own: the fake group takes the place of the real one
    try:
        for detects in (True, False):
            for nodes in (2, 64):
                (counts,) = pools.run(1, counted, nodes, detects)
                assert counts == COUNTS
    finally:
        pools.close()

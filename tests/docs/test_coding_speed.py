"""Tables of exact coding: what is timed or counted is told near its entropy, and read back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from examples.differences.bits import _entropy
from scripts import coding_speed, readme
from tests.ranks import on_ranks


def test_each_case_is_coded_and_shown() -> None:
    found = coding_speed.measured(2**14, rounds=2)
    bits = {row["case"]: row["bits"] for row in found["rows"]}
    assert bits.keys() == {row["case"] for row in readme.committed("coding-speed")["rows"]}
    told = [bits[f"bf16 after a step at {rate:g}, entropy"] for rate in coding_speed.RATES]
    assert told == sorted(told, reverse=True)
    assert bits["bf16 gradients, exponents"] < 11.2
    assert all(
        f"| {name} | {count:.2f} |" in coding_speed.table(found) for name, count in bits.items()
    )


def test_gathers_are_near_the_entropy_of_the_same_steps_and_reductions_are_coded() -> None:
    rows = readme.committed("difference-bits")["rows"]
    assert {1e-5, 3e-5, 1e-6} < {row["learning_rate"] for row in rows}
    for row in rows:
        # At the lowest rate each of ten messages per step of the smaller model is of 4 kB.
        most = 1.25 if row["learning_rate"] == 1e-6 and row["parameters"] < 1e7 else 1.2
        assert 1 < row["gathers"][1] / row["entropy"][1] <= most
        assert row["reductions"][1] <= 11.2


@on_ranks(2)
def test_the_entropy_is_that_of_all_ranks_words() -> None:
    assert _entropy(torch.tensor([dist.get_rank()] * 8)) == 1.0
    assert _entropy(torch.tensor([0, 0, 0, 65535])) == pytest.approx(0.811278)

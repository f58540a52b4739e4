"""Which parameters a stage has."""

from __future__ import annotations

import torch.nn as nn

from baselines.cyclic.rule import partition
from baselines.cyclic.stages import parameters


def test_what_is_outside_of_the_blocks_is_in_the_first_or_the_last_stage() -> None:
    blocks = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(3, 2), *blocks, nn.LayerNorm(2))
    first, last = parameters(model, blocks, partition([1] * 4, 2))
    assert {id(param) for param in first} == {
        id(param) for module in (model[0], *blocks[:2]) for param in module.parameters()
    }
    assert {id(param) for param in last} == {
        id(param) for module in (*blocks[2:], model[5]) for param in module.parameters()
    }


def test_frozen_parameters_are_in_no_stage() -> None:
    blocks = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    model = nn.Sequential(*blocks)
    blocks[0].requires_grad_(False)
    assert parameters(model, blocks, partition([1, 1], 2)) == [[], [blocks[1].weight]]

"""Micro-batches of one step must give gradients to the same parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import fcdp
from tests.fcdp.training import topology_of
from tests.ranks import Pools


class Sometimes(nn.Module):
    """Of two layers of one unit, the second is used where the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return self.sometimes(y) if x.sum() > 0 else y


def change_layers(codec: fcdp.Codec | None) -> str:
    model = nn.Sequential(Sometimes())
    fcdp.shard(
        model,
        topology_of(2, 1),
        units=[model[0]],
        reduce_codec=codec,
        error_feedback=codec is not None,
    )
    x = torch.ones(1, 3)
    with fcdp.accumulate(model, last=False):
        model(x).sum().backward()
    with pytest.raises(RuntimeError) as error, fcdp.accumulate(model, last=True):
        model(-x).sum().backward()
    return str(error.value)


@pytest.mark.parametrize("codec", [None, fcdp.BlockInt8()], ids=["plain", "encoded"])
def test_gradients_of_other_parameters_are_refused(ranks: Pools, codec: fcdp.Codec | None) -> None:
    for message in ranks.run(2, change_layers, codec):
        assert "other parameters received gradients in this micro-batch" in message
        assert "set_reduce_scatter_unused_params(True)" in message

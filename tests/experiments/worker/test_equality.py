"""Ranks whose weights differ do not train."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from experiments.records.workload import Origin, OwnModel
from experiments.worker import models
from tests.experiments.cells import cell
from tests.fcdp.training import topology_of
from tests.ranks import Pools


def compared(of_a_user: bool, differ: bool) -> str | None:
    """What the check says on this rank of weights that differ, or do not."""
    topology = topology_of(2, 1)
    torch.manual_seed(topology.rank if differ else 0)
    own = {"model": OwnModel(name="mine", function="mine:build")} if of_a_user else {}
    wanted = cell("fcdp", origin=Origin(model="mine.yaml:5: models[0]"), **own)
    try:
        models.check(nn.Linear(3, 3), wanted, topology)
    except ValueError as error:
        return str(error)
    return None


def test_unequal_weights_of_a_user_are_an_error_on_all_ranks(ranks: Pools) -> None:
    said = ranks.run(2, compared, True, True)
    assert said[0] == said[1]
    assert said[0].startswith(
        "mine.yaml:5: models[0].function: mine:build makes other weights on rank 1 than on rank 0"
    )


@pytest.mark.parametrize(("of_a_user", "differ"), [(True, False), (False, True)])
def test_equal_ones_and_built_in_ones_are_none(ranks: Pools, of_a_user: bool, differ: bool) -> None:
    assert ranks.run(2, compared, of_a_user, differ) == [None, None]

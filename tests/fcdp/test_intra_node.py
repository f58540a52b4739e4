"""A user's all-gather takes the half of a gather that stays inside the node."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fcdp import training
from tests.fcdp.peer_copies import PeerCopies
from tests.fcdp.stand_ins import OwnAllGather
from tests.fcdp.training import Settings
from tests.ranks import Pools

pytestmark = pytest.mark.ranks


def both(
    settings: Settings, kind: type[OwnAllGather]
) -> tuple[training.Result, training.Result, int, set[int]]:
    theirs = training.train(settings, "fcdp")
    settings = replace(settings, intra_node=(own := kind()))
    return theirs, training.train(settings, "fcdp"), own.allocated, own.groups


@pytest.mark.parametrize("kind", [OwnAllGather, PeerCopies])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("exchanges", ["hierarchical", "flat"])
def test_it_is_called_for_the_ranks_of_a_node(
    ranks: Pools, shape: tuple[int, int], exchanges: Any, kind: type[OwnAllGather]
) -> None:
    nodes, per_node = shape
    settings = Settings(nodes, per_node, steps=2, exchanges=exchanges)
    for theirs, ours, allocated, groups in ranks.run(settings.world_size, both, settings, kind):
        assert ours.losses == theirs.losses
        assert ours.ledger == theirs.ledger
        assert all(torch.equal(ours.params[name], each) for name, each in theirs.params.items())
        assert allocated > 0
        assert groups == ({per_node} if per_node > 1 else set())

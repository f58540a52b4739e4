"""Training in half precision with codecs that lose nothing: bit for bit as without.

Each has units in all three tiers, micro-batches and a checkpoint that it goes back to; on processes
reductions are coded too, which accelerators refuse.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fcdp
from fcdp.engine import engine_of
from tests.fcdp import training
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import Settings
from tests.ranks import Pools
from tests.tiers import in_ci

STEPS = 8


class Trained(NamedTuple):
    """Bits that one rank computed, and where and how it had them."""

    #: Losses and parameters.
    computed: list[torch.Tensor]
    tiers: set[str | None]
    sent: dict[str, int]


def train(settings: Settings, coded: bool, directory: Path) -> Trained:
    on_cpu = torch.get_default_device().type == "cpu"
    one = 600 * 2 // settings.world_size  # a unit of three
    run = training.Run(
        replace(
            settings,
            policy=fcdp.Budget(device=one, host=one, disk=one, directory=directory),
            gather_codec=fcdp.Delta("smallest") if coded else None,
            reduce_codec=fcdp.Exact("always") if coded and on_cpu else None,
        )
    )
    model, optimizer, computed = run.model, run.optimizer, []
    optimizer.param_groups[0].update(lr=1e-5, eps=1e-8)
    for step in range(STEPS):
        for last in (False, True):
            with fcdp.accumulate(model, last=last):
                loss = run.loss()
                loss.backward()
            computed.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS // 3:
            fcdp.save(model, optimizer, directory / f"checkpoint {coded}")
        if step == STEPS // 2:
            fcdp.load(model, optimizer, directory / f"checkpoint {coded}")
    computed += [training.whole(param).detach() for param in model.parameters()]
    engine = engine_of(model)
    tiers = {engine.entries[unit].tier for unit in engine.units}
    sent = fcdp.ledger(model).snapshot()["inter_node"]
    return Trained([each.cpu().view(-1).view(torch.uint8) for each in computed], tiers, sent)


@pytest.mark.parametrize(
    ("dtype", "ranks_per_node"),
    [(torch.bfloat16, 2), in_ci(torch.float16, 2), in_ci(torch.bfloat16, 1)],
    ids=["bf16", "fp16", "bf16 on an accelerator"],
)
def test_training_is_bit_for_bit_as_without(
    ranks: Pools, apart: Pools, dtype: torch.dtype, ranks_per_node: int, tmp_path: Path
) -> None:
    on_processes = ranks_per_node == 2
    pools = ranks if on_processes else OnStreams(apart)
    # Of the last unit too: it is in the cache only then.
    settings = Settings(
        2, ranks_per_node, param_dtype=dtype, reduce_dtype=dtype, reshard_after_forward=True
    )
    expected, actual = (
        pools.run(settings.world_size, train, settings, coded, tmp_path, timeout_s=400.0)
        for coded in (False, True)
    )
    for mine, other in zip(actual, expected, strict=True):
        assert all(map(torch.equal, mine.computed, other.computed))
        assert len(mine.computed) == len(other.computed)
        assert mine.tiers == {"device", "host", "disk"}
        assert mine.sent["forward"] < other.sent["forward"]
        assert (mine.sent["reduce"] != other.sent["reduce"]) == on_processes

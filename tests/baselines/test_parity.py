"""FCDP trains real models like FSDP2, by the strategies that cells use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.baselines.training import USUAL, Family, Settings, Tuning, train
from tests.ranks import Pools

#: Two nodes of one rank: two summands have one order, so that sums are equal to the last bit.
NODES = 2


@dataclass(frozen=True)
class Result:
    losses: list[float]
    #: Parameters after the last step, whole.
    trained: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]


def train_and_gather(strategy: str, settings: Settings) -> Result:
    """Train on this rank; the parameters of all."""
    model, losses = train(strategy, settings)
    whole = []
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        whole.append((name, param.full_tensor().detach(), param.requires_grad))
    return Result(
        losses,
        {name: param for name, param, trains in whole if trains},
        {name: param for name, param, trains in whole if not trains},
    )


def compare(ranks: Pools, settings: Settings, *, losses: float, trained: float) -> None:
    """Train with both; losses may differ by that share, what is trained by that much."""
    expected = ranks.run(NODES, train_and_gather, "fsdp2", settings)
    actual = ranks.run(NODES, train_and_gather, "fcdp", settings)
    for wanted, got in zip(expected, actual, strict=True):
        assert len(got.losses) == settings.steps
        assert got.losses == pytest.approx(wanted.losses, rel=losses, abs=0)
        assert got.trained.keys() == wanted.trained.keys()
        for name, param in wanted.trained.items():
            torch.testing.assert_close(got.trained[name], param, rtol=0, atol=trained)
        assert got.frozen.keys() == wanted.frozen.keys()
        assert bool(got.frozen) == (settings.tuning == "lora")
        for name, param in wanted.frozen.items():
            assert torch.equal(got.frozen[name], param), name
    means = [sum(step) / NODES for step in zip(*(rank.losses for rank in expected), strict=True)]
    assert min(means) < means[0] - 0.05, "the reference did not train"


@pytest.mark.parametrize(
    ("family", "tuning", "dtype"),
    [
        ("gpt2", "full", torch.float32),
        ("llama", "lora", torch.float32),
        ("llama", "full", torch.bfloat16),
    ],
)
def test_training_equals_fsdp2s_to_the_last_bit(
    ranks: Pools, family: Family, tuning: Tuning, dtype: torch.dtype
) -> None:
    compare(ranks, Settings(family, tuning, dtype=dtype), losses=0, trained=0)


#: Where FSDP2's mixed precision, or a whole model in bfloat16, casts what is frozen in any case.
CAST = ("fsdp2", "fcdp")


@pytest.mark.parametrize("strategy", [*CAST, "ddp", "replicated"])
def test_frozen_parameters_held_in_bfloat16_train_the_same(ranks: Pools, strategy: str) -> None:
    """Autocast computes norms in float32 with weights as they are: DDP's losses differ a little."""
    settings = Settings("llama", "lora", dtype=torch.bfloat16, steps=6, learning_rate=USUAL)
    held = replace(settings, frozen=torch.bfloat16)
    expected = ranks.run(NODES, losses_and_frozen_bytes, strategy, settings)
    actual = ranks.run(NODES, losses_and_frozen_bytes, strategy, held)
    for (wanted, wide), (got, narrow) in zip(expected, actual, strict=True):
        assert got == pytest.approx(wanted, rel=0 if strategy in CAST else 0.01, abs=0)
        assert narrow == wide / 2 > 0


def losses_and_frozen_bytes(strategy: str, settings: Settings) -> tuple[list[float], int]:
    """Of training on this rank; the bytes that it holds of what is frozen."""
    model, losses = train(strategy, settings)
    frozen = [param for param in model.parameters() if not param.requires_grad]
    held = [param.to_local() if isinstance(param, DTensor) else param for param in frozen]
    return losses, sum(part.nbytes for part in held)


def test_accumulation_matches_fsdp2(ranks: Pools) -> None:
    """FCDP adds micro-batches up before the nodes, FSDP2 after: the last bits differ."""
    settings = Settings("llama", "lora", accumulation=4, learning_rate=USUAL)
    compare(ranks, settings, losses=1e-6, trained=1e-5)

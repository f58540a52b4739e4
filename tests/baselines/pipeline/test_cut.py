"""Where models can be cut, and what is said of those that cannot."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn

from baselines.pipeline.cut import look
from baselines.strategy import Job
from tests.baselines.cyclic.training import Tied, loss
from tests.baselines.jobs import alone, job


def job_of(model: Any) -> Job:
    return job(alone(), model.blocks, loss=loss)


def test_the_head_counts_as_much_as_its_matrix() -> None:
    model = Tied()
    anatomy = look(model, job_of(model))
    assert anatomy.cut(model.blocks, 2) == [range(3), range(3, 5)]
    wide = nn.Parameter(torch.zeros(11, 1000))
    heavy = replace(anatomy, after=(wide,))
    assert heavy.cut(model.blocks, 2) == [range(4), range(4, 5)]
    with pytest.raises(ValueError, match="6 stages need as many blocks, and the model has 5"):
        anatomy.cut(model.blocks, 6)


def between(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(tokens)
    for block in model.blocks:
        hidden = model.norm(block(hidden))
    return model.head(hidden)


def skipping(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(tokens)
    all_hidden = [hidden := block(hidden) for block in model.blocks]
    return model.head(hidden + all_hidden[1])


def twice(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(tokens)
    for block in (*model.blocks, model.blocks[0]):
        hidden = block(hidden)
    return model.head(hidden)


def two_inputs(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    hidden = embedded = model.embedding(tokens)
    for block in model.blocks:
        block.forward = lambda hidden, more: hidden + more
        hidden = block(hidden, embedded)
    return model.head(hidden)


def not_all(model: Tied, tokens: torch.Tensor) -> torch.Tensor:
    return model.head(model.blocks[0](model.embedding(tokens)))


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (between, "block 1 does not take what block 0 returns"),
        (skipping, "its loss depends on other blocks than the last one directly"),
        (twice, "block 0 is called before those in front of it, or again"),
        (not_all, "1 of its 5 blocks are called"),
        (two_inputs, "block 0 takes 2 tensors that depend on parameters, not 1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_what_is_in_the_way(
    forward: Callable[[Tied, torch.Tensor], torch.Tensor], why: str
) -> None:
    model = Tied()
    model.forward = partial(forward, model)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"cannot be cut between its blocks: {why}; allowed are"):
        look(model, job_of(model))
    for module in model.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks}


class Weighing(nn.Module):
    """A block that returns something beside what it hands on, as attention's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.linear(hidden)
        return out, out.sum(-1)


class Weighed(Tied):
    """A model of such blocks, whose loss may depend on what they return beside."""

    uses = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Weighing() for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, weights = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            hidden, beside = block(hidden)
            weights = weights + beside.mean()
        return self.head(hidden) + weights if self.uses else self.head(hidden)


def test_what_blocks_return_beside_may_be_there_and_not_be_used() -> None:
    model = Weighed()
    assert {seam.returned for seam in look(model, job_of(model)).seams} == {0}
    model.uses = True
    with pytest.raises(ValueError, match="its loss depends on other blocks"):
        look(model, job_of(model))


def test_shared_blocks_are_refused() -> None:
    model = Tied()
    model.blocks[1].into.weight = model.blocks[0].into.weight
    with pytest.raises(ValueError, match="blocks share parameters"):
        look(model, job_of(model))

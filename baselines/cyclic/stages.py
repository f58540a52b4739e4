"""A model's parameters in stages: consecutive blocks of about equal cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn

from baselines.cyclic.rule import chosen
from baselines.strategy import numel


def chosen_runs(
    stages: int | None, blocks: Sequence[nn.Module], most: int, called: str
) -> list[range]:
    """Cut blocks into stages of about as many parameters each; see ``partition.chosen``."""
    return chosen(stages, [numel(block.parameters()) for block in blocks], most, called)


def parameters(
    model: nn.Module, blocks: Sequence[nn.Module], runs: Sequence[range], *, frozen: bool = False
) -> list[list[nn.Parameter]]:
    """The trained parameters of each stage, and frozen ones if asked for, in the model's order.

    What is outside of the blocks belongs to the first stage if the model has it before the last
    block, else to the last: embeddings and head, as models are written. A parameter that several
    modules share belongs where it is first.
    """
    stage_of = {
        id(param): stage
        for stage, run in enumerate(runs)
        for index in run
        for param in blocks[index].parameters()
    }
    found: list[list[nn.Parameter]] = [[] for _ in runs]
    outside = 0
    for param in model.parameters():
        stage = stage_of.get(id(param))
        if stage is None:
            stage = outside
        elif stage == len(runs) - 1:
            outside = stage
        if frozen or param.requires_grad:
            found[stage].append(param)
    return found


def split(
    params: Sequence[nn.Parameter], blocks: Sequence[nn.Module]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of no block or of several ones, which stages share, and those of one block."""
    times = Counter(id(param) for block in blocks for param in block.parameters())
    return (
        [param for param in params if times[id(param)] != 1],
        [param for param in params if times[id(param)] == 1],
    )


def begin_stage(block: nn.Module, called: Callable[[Any], Any]) -> None:
    """Have ``called`` turn what a stage's first block is given into what it computes with."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return called((args, kwargs))

    block.register_forward_pre_hook(hook, with_kwargs=True)

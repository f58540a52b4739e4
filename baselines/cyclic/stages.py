"""A model's parameters in stages: consecutive blocks of about equal cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch.nn as nn

from baselines.strategy import numel


def chosen_runs(
    stages: int | None, blocks: Sequence[nn.Module], most: int, called: str
) -> list[range]:
    """Cut blocks into stages of about as many parameters each: ``most`` of them, unless chosen.

    ``called`` says what there are ``most`` of. Raises ``ValueError`` for more stages than blocks or
    than that.
    """
    count = most if stages is None else stages
    if count > min(most, len(blocks)):
        raise ValueError(
            f"stages = {count}: allowed are 1 to {min(most, len(blocks))}, as there are "
            f"{most} {called} and {len(blocks)} blocks"
        )
    return partition([numel(block.parameters()) for block in blocks], count)


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Cut consecutive blocks into ``stages`` runs, where the costs up to each cut are nearest.

    Every run has at least one block. Raises ``ValueError`` for more stages than blocks, for fewer
    than one, and for a cost below 0.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages = {stages}: allowed are 1 to {len(costs)}, the number of blocks")
    if min(costs) < 0:
        raise ValueError(f"costs = {[*costs]}: allowed are numbers from 0")
    upto = [0.0, *accumulate(costs)]
    cuts = [0]
    for stage in range(1, stages):
        wanted = upto[-1] * stage / stages
        places = range(cuts[-1] + 1, len(costs) - (stages - stage) + 1)
        cuts.append(min(places, key=lambda place: abs(upto[place] - wanted)))
    cuts.append(len(costs))
    return [range(begin, end) for begin, end in pairwise(cuts)]


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

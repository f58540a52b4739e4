"""A model in stages: consecutive blocks of about equal cost, and graphs that are cut there."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from baselines.cyclic.routes import chosen
from baselines.pytorch.ddp import autocast
from baselines.strategy import Job, Trainable, numel


def chosen_runs(
    stages: int | None, blocks: Sequence[nn.Module], most: int, called: str
) -> list[range]:
    """Cut blocks into stages of about as many parameters each; see ``routes.chosen``."""
    return chosen(stages, [numel(block.parameters()) for block in blocks], most, called)


def parameters(
    model: nn.Module, blocks: Sequence[nn.Module], runs: Sequence[range], *, frozen: bool = False
) -> list[list[nn.Parameter]]:
    """The trained parameters of each stage, and frozen ones if asked for, in the model's order.

    Those outside of the blocks, embeddings and head, belong to the first stage if the model has
    them before the last block, else to the last. A parameter that several modules share belongs
    where it is first.
    """
    stage_of = {
        id(param): stage
        for stage, run in enumerate(runs)
        for index in run
        for param in blocks[index].parameters()
    }
    by_stage: list[list[nn.Parameter]] = [[] for _ in runs]
    outside = 0
    for param in model.parameters():
        stage = stage_of.get(id(param))
        if stage is None:
            stage = outside
        elif stage == len(runs) - 1:
            outside = stage
        if frozen or param.requires_grad:
            by_stage[stage].append(param)
    return by_stage


class Staged(Trainable):
    """A model whose forward is interrupted where stages meet."""

    def __init__(
        self, model: nn.Module, job: Job, closed_form_bytes: float, runs: Sequence[range]
    ) -> None:
        """``runs``: each stage's blocks."""
        super().__init__(model, job, closed_form_bytes)
        for index, run in enumerate(runs[1:], start=1):

            def begin(_block: nn.Module, args: Any, kwargs: Any, index: int = index) -> Any:
                return self._next_stage(index, (args, kwargs))

            job.blocks[run.start].register_forward_pre_hook(begin, with_kwargs=True)

    def casting(self) -> torch.autocast:
        return autocast(self.job, cached=False)

    def _next_stage(self, index: int, inputs: Any) -> Any:
        """Called before a stage's first block; returns the inputs that the block computes with."""
        raise NotImplementedError


class Segments:
    """The parts of one micro-batch's graph, one per stage, so that backward goes stage by stage.

    Stages may hand on tensors only as arguments of a stage's first block.
    """

    def __init__(self) -> None:
        #: By stage: the edge that each input came from, and the input, detached. An edge and not
        #: the tensor, whose memory would stay.
        self._cuts: dict[int, list[tuple[GradientEdge, torch.Tensor]]] = {}
        #: The loss, a scalar, which the last stage's backward takes.
        self.loss: torch.Tensor | None = None

    def cut(self, stage: int, inputs: Any) -> Any:
        """Detach ``inputs``, arguments of any structure, as the start of this stage's graph."""
        cuts: list[tuple[GradientEdge, torch.Tensor]] = []

        def begin(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                return value
            leaf = value.detach().requires_grad_()
            cuts.append((get_gradient_edge(value), leaf))
            return leaf

        begun = tree_map(begin, inputs)
        self._cuts[stage] = cuts
        return begun

    def backward(self, stage: int) -> None:
        """Backward of one stage: the last one first, each once."""
        if self.loss is not None:
            loss, self.loss = self.loss, None
            loss.backward()
            return
        cuts = self._cuts.pop(stage + 1)
        reached = [(edge, leaf.grad) for edge, leaf in cuts if leaf.grad is not None]
        if reached:
            edges, gradients = zip(*reached, strict=True)
            torch.autograd.backward(edges, gradients)

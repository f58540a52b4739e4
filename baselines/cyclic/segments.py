"""A micro-batch's graph, cut where stages meet, so that backward goes stage by stage."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map


class Segments:
    """The parts of one micro-batch's graph, one per stage.

    Stages may hand on tensors only as arguments of a stage's first block.
    """

    def __init__(self) -> None:
        #: By stage: where what came into it came from, and what it was computed with. An edge and
        #: not the tensor, whose memory would stay.
        self._cuts: dict[int, list[tuple[GradientEdge, torch.Tensor]]] = {}
        self._loss: torch.Tensor | None = None

    def cut(self, stage: int, given: Any) -> Any:
        """``given``, arguments of any structure, as the beginning of this stage's own graph."""
        cuts: list[tuple[GradientEdge, torch.Tensor]] = []

        def begin(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                return value
            own = value.detach().requires_grad_()
            cuts.append((get_gradient_edge(value), own))
            return own

        begun = tree_map(begin, given)
        self._cuts[stage] = cuts
        return begun

    def end(self, loss: torch.Tensor) -> None:
        """Take the scalar that the last stage's backward begins with."""
        self._loss = loss

    def backward(self, stage: int) -> None:
        """Backward of one stage: the last one first, each once."""
        if self._loss is not None:
            loss, self._loss = self._loss, None
            loss.backward()
            return
        cuts = self._cuts.pop(stage + 1)
        reached = [(edge, own.grad) for edge, own in cuts if own.grad is not None]
        if reached:
            edges, gradients = zip(*reached, strict=True)
            torch.autograd.backward(edges, gradients)

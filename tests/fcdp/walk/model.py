"""A model whose gradients add up exactly, so that no order of sums shows.

Each use of a parameter rounds its gradient to a multiple of one small number. Sums of such
multiples over uses, micro-batches and ranks are exact in float64 whatever their order, and so is
their mean over ranks. Parameters, activations and losses are not rounded at all: a parameter that
is one bit off gives another loss.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.fcdp.walk.options import Options

VOCABULARY = 11
LENGTH = 3
BATCH = 2


class Boom(Exception):
    """The error of a forward that is asked to fail."""


class FailsInBackward(torch.autograd.Function):
    """The identity, whose gradient cannot be had.

    No tensor's hook: of one that raises, a device that is written in Python would hide the error.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise Boom("in backward")

    @classmethod
    def hook(cls, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """A forward hook: the module's output fails in backward."""
        return cls.apply(output)


class _Coarse(torch.autograd.Function):
    """The parameter itself; its gradient rounded to multiples of ``unit``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, unit: float) -> torch.Tensor:
        ctx.unit = unit
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.round(grads[0] / ctx.unit) * ctx.unit, None


def coarse(weight: torch.Tensor, unit: float) -> torch.Tensor:
    return _Coarse.apply(weight, unit)


class Linear(nn.Module):
    """Products and sums without BLAS, which may round otherwise where memory lies otherwise."""

    def __init__(self, inputs: int, outputs: int, unit: float, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float64))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=torch.float64)) if bias else None
        self.unit = unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.unsqueeze(-2) * coarse(self.weight, self.unit)).sum(-1)
        return y if self.bias is None else y + coarse(self.bias, self.unit)


class Adapter(nn.Module):
    """A low-rank update, as LoRA adds it."""

    def __init__(self, width: int, rank: int, unit: float) -> None:
        super().__init__()
        self.down = Linear(width, rank, unit, bias=False)
        self.up = Linear(rank, width, unit, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


class Block(nn.Module):
    """Has a parameter of one element, and one of as many rows as no number of ranks divides."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, unit = options.width, options.unit
        self.up = Linear(width, 7, unit)
        self.down = Linear(7, width, unit)
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float64))
        self.adapter = Adapter(width, options.adapter_rank, unit) if options.adapter_rank else None
        self.unit = unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        if self.adapter is not None:
            y = y + self.adapter(x)
        return x + torch.tanh(y * coarse(self.scale, self.unit))

    def refine(self, x: torch.Tensor) -> torch.Tensor:
        """Another method that computes with the parameters."""
        return self.forward(x) * 0.5


class Net(nn.Module):
    """Embedding, blocks, head; tied, and with a block called twice, if the options say so."""

    def __init__(self, options: Options, seed: int) -> None:
        super().__init__()
        width, unit = options.width, options.unit
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, width, dtype=torch.float64))
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.blocks))
        self.head = Linear(width, VOCABULARY, unit, bias=not options.tied)
        if options.tied:
            self.head.weight = self.embedding
        self.order = [0] * options.twice + list(range(options.blocks))
        self.checkpointing = options.checkpointing
        self.unit = unit
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)
            param.requires_grad_(options.trains_at_first(name))

    def forward(
        self,
        tokens: torch.Tensor,
        skip: frozenset[int] = frozenset(),
        fails_before: int | None = None,
    ) -> torch.Tensor:
        return self.head(self._hidden(tokens, skip, fails_before))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Another method that computes with the parameters of all blocks."""
        return self._hidden(tokens, frozenset(), None)

    def _hidden(
        self, tokens: torch.Tensor, skip: frozenset[int], fails_before: int | None
    ) -> torch.Tensor:
        x = F.embedding(tokens, coarse(self.embedding, self.unit))
        for index in self.order:
            if index == fails_before:
                raise Boom(f"before block {index}")
            if index in skip:
                continue
            block = self.blocks[index]
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if fails_before == len(self.blocks):
            raise Boom("before the head")
        return x


def batch(seed: int, rank: int) -> torch.Tensor:
    """Tokens of one micro-batch: inputs and, one place further, targets."""
    generator = torch.Generator().manual_seed(seed * 16 + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def inputs_of_a_block(seed: int, rank: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 16 + rank)
    return torch.randn(BATCH, width, generator=generator, dtype=torch.float64)

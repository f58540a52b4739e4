"""One transformer block, forward and backward, as training computes it: what preflight times."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from experiments.preflight.schema import BlockShape


class Block(nn.Module):
    """A block of GPT-2's kind; attention, each norm and the activation function are a kernel."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        width = shape.width
        self._heads = shape.heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: sequences × length × width
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self._heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return x + y

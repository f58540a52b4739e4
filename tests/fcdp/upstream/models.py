"""Small models of the shapes that upstream's cases use."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY = 31


class MLP(nn.Module):
    """Two linear layers; the inner width is not a multiple of the ranks where ``dim`` is odd."""

    def __init__(self, dim: int, factor: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, factor * dim)
        self.out_proj = nn.Linear(factor * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(F.relu(self.in_proj(x)))


def mlps(count: int, dim: int) -> nn.Sequential:
    torch.manual_seed(42)
    return nn.Sequential(*(MLP(dim) for _ in range(count)))


class DoubleLinear(nn.Module):
    """Two layers beside each other; the second may be left out of what is returned."""

    def __init__(self, dim: int, *, use_second: bool) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.use_second = use_second

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        first = F.relu(self.lin1(x))
        return (first, F.relu(self.lin2(x))) if self.use_second else first


class Branches(nn.Module):
    """Two layers beside each other, of which the chosen ones are used."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.left, self.right = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, *, used: str) -> torch.Tensor:
        branches = [branch(x) for name, branch in self.named_children() if name in used]
        return torch.stack(branches).sum(0)


class Block(nn.Module):
    """Attention with one head, and an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mlp = MLP(dim, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.mlp(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Transformer(nn.Module):
    """A decoder, with embedding and head of one weight if ``tied``."""

    def __init__(
        self, layers: int = 3, dim: int = 12, *, tied: bool = False, checkpointing: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(self.norm(x))

    def units(self) -> Sequence[nn.Module]:
        return [*self.layers, self]

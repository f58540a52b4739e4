"""What is adapted of a model's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn


def linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Names of the matrices in the blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]

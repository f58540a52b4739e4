"""The transformer blocks of a model of any family: what is gathered one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn


def find(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest ``ModuleList`` of equal ones; none where there is no such list.

    Lists inside of other ones, such as the experts of a block, do not count. Blocks of several
    classes are equal where ``transformers`` names each of them as one not to split.
    """
    whole = frozenset(getattr(model, "_no_split_modules", None) or ())
    lists = [list(found) for found in _outermost(model, whole)]
    return max(lists, key=len, default=[])


def _outermost(module: nn.Module, whole: frozenset[str]) -> list[nn.ModuleList]:
    if isinstance(module, nn.ModuleList) and _are_equal(module, whole):
        return [module]
    return [found for child in module.children() for found in _outermost(child, whole)]


def _are_equal(modules: nn.ModuleList, whole: frozenset[str]) -> bool:
    kinds = {type(module).__name__ for module in modules}
    has_parameters = all(any(True for _ in module.parameters()) for module in modules)
    return has_parameters and (len(kinds) == 1 or (bool(kinds) and kinds <= whole))


def linear_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Names of the matrices in the blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]

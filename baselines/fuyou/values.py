"""Parameters and moments of a group: from the model into its buffer, and out of the files."""

from __future__ import annotations

import torch

from baselines.fuyou.layout import Group
from baselines.fuyou.optimizer import cast
from baselines.fuyou.store import Store


def fill(group: Group, buffer: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill a buffer with the model's values, which it computes with in ``dtype``; no moments."""
    buffer[: group.nbytes].zero_()
    held = torch.float32 if group.trained else dtype
    views = group.views(group.part(buffer, group.segments[0].name), held)
    for view, param in zip(views, group.params, strict=True):
        view.copy_(param.detach())
    if group.trained:
        cast(group, buffer)


def read_out(
    group: Group, store: Store, buffer: torch.Tensor, dtype: torch.dtype
) -> list[tuple[str, torch.Tensor, list[torch.Tensor]]]:
    """Each parameter's name, values and moments, by way of a buffer; frozen ones have none."""
    names = [segment.name for segment in group.segments]
    for read in store.read(group, names, buffer):
        read.result()
    if not group.trained:
        frozen = group.views(group.part(buffer, "compute"), dtype)
        return [(n, v.clone(), []) for n, v in zip(group.names, frozen, strict=True)]
    parts = [(group.part(buffer, "master"), 0)]
    parts += [(group.part(buffer, "moments"), place * group.numel) for place in (0, 1)]
    views = [group.views(part, torch.float32, first) for part, first in parts]
    found = []
    for name, *of in zip(group.names, *views, strict=True):
        master, *moments = (value.clone() for value in of)
        found.append((name, master, moments))
    return found

"""Tensor classes that gather by FSDP2 extensions: a packed one, and one that is rounded to send.

Both unpack to a plain parameter, whose memory FSDP2 frees and takes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
#: Operators that FSDP2, DTensors and checkpoints call to cut a tensor, and to copy it.
_KEPT = {
    aten.detach.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.split.Tensor,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
}


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, around others whose first has the same shape."""

    #: Names of the tensors inside.
    INSIDE: Sequence[str] = ()

    @staticmethod
    def __new__(cls, *inside: torch.Tensor) -> Any:
        first = inside[0]
        return torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=torch.float32, device=first.device
        )

    def __init__(self, *inside: torch.Tensor) -> None:
        for name, tensor in zip(self.INSIDE, inside, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [*self.INSIDE], None

    @classmethod
    def __tensor_unflatten__(cls, inside: Mapping[str, torch.Tensor], *_: Any) -> Any:
        return cls(*inside.values())

    def inside(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.INSIDE]

    def whole(self) -> torch.Tensor:
        """The values that a forward computes with."""
        raise NotImplementedError

    def unpack(self, sent: Sequence[torch.Tensor], about: Any) -> torch.Tensor:
        """The values of what all ranks have sent, one behind the other."""
        raise NotImplementedError

    def fsdp_post_all_gather(
        self,
        sent: Sequence[torch.Tensor],
        about: Any,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        values = self.unpack(sent, about)
        if out is None:
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(values)
        return None


class Packed(Wrapper):
    """A byte per value and a scale per row; frozen. Scales may be any bits, NaNs' too."""

    INSIDE = ("codes", "scales")
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        scales = values.abs().amax(1, keepdim=True) / 127
        return cls((values / scales + 128).round().to(torch.uint8), scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        this = args[0]
        if func is aten.copy_.default and isinstance(args[1], cls):
            for mine, other in zip(this.inside(), args[1].inside(), strict=True):
                mine.copy_(other)
            return this
        if func is aten.new_zeros.default:
            rows = args[1][0]
            return cls(*(each.new_zeros(rows, *each.shape[1:]) for each in this.inside()))
        if func is aten.mul_.Tensor:
            this.scales.mul_(args[1])
            return this
        if func in (aten.as_strided.default, aten.view.default):
            rows = [each.flatten() if [*args[1]] == [-1] else each for each in this.inside()]
            return cls(*(each.view(each.shape) for each in rows))
        if func is aten._to_copy.default:
            return cls(*(each.to(kwargs.get("device"), copy=True) for each in this.inside()))
        if func in _KEPT:
            made = [func(each, *args[1:], **kwargs) for each in this.inside()]
            if isinstance(made[0], torch.Tensor):
                return cls(*made)
            return [*map(cls, *made)]
        return func(*tree_map_only(cls, cls.whole, args), **tree_map_only(cls, cls.whole, kwargs))

    def whole(self) -> torch.Tensor:
        return (self.codes.to(torch.float32) - 128) * self.scales

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return tuple(self.inside()), None

    def unpack(self, sent: Sequence[torch.Tensor], about: None) -> torch.Tensor:
        return type(self)(*sent).whole()


class Coded(Packed):
    """A byte per value, in steps of one size: a single tensor of the same shape holds it."""

    INSIDE = ("codes",)
    scales = torch.tensor(2.0**-6)

    @classmethod
    def of(cls, values: torch.Tensor) -> Any:
        return cls((values / cls.scales + 128).round().to(torch.uint8))


class Growing(Packed):
    """It sends a byte more per row from its third gather on."""

    gathers = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        self.gathers += 1
        codes = self.codes if self.gathers < 3 else nn.functional.pad(self.codes, (0, 1))
        return (codes, self.scales), None


class Uneven(Packed):
    """It sends a byte more per row on the first rank of its mesh."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        codes = nn.functional.pad(self.codes, (0, 1)) if mesh.get_local_rank() == 0 else self.codes
        return (codes, self.scales), None


class Rounded(Wrapper):
    """Trained in float32, sent as int8 by a scale on which the ranks agree at each gather."""

    INSIDE = ("values",)
    values: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = partial(tree_map_only, cls, cls.whole)
        out = func(*plain(args), **plain(kwargs or {}))
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, cls, out) if func in _KEPT else out

    def whole(self) -> torch.Tensor:
        return self.values

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        scale = self.values.abs().max() / 127
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        # Sent, too: FSDP2 orders no stream after what is computed beside a gather.
        return ((self.values / scale).round().to(torch.int8), scale.repeat(len(self), 1)), None

    def unpack(self, sent: Sequence[torch.Tensor], about: None) -> torch.Tensor:
        return sent[0].to(torch.float32) * sent[1]


#: Classes by name, and how values become one.
CLASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "packed": Packed.of,
    "coded": Coded.of,
    "growing": Growing.of,
    "uneven": Uneven.of,
    "rounded": Rounded,
}


def extend(model: nn.Module, kind: str) -> None:
    """Give the matrices of a model's blocks, but for adapters, a class that gathers by itself.

    Their rows must divide by the ranks.
    """
    for block in model.blocks:  # type: ignore[union-attr]
        weight = block.down.weight
        made = nn.Parameter(CLASSES[kind](weight.detach()), weight.requires_grad)
        block.down.weight = made

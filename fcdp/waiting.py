"""Stand-in for ``.grad`` while a step's sum waits to cross nodes: nothing to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten


class Waiting(torch.Tensor):
    """The gradient of one parameter before the step's last micro-batch. It takes no memory.

    FSDP2 gets one for a whole unit as the output of a reduction that does not cross nodes; it
    divides that, cuts it up and adds the parts to those in ``.grad``, none of which does anything.
    Whoever reads a part gets a ``RuntimeError``. Zeroing it, in whatever way, gives up what waits:
    from then on it is zeros, as with FSDP2. Nothing waits for the device.
    """

    #: Gradients that have crossed nodes already: those in ``.grad`` before.
    before: torch.Tensor | None
    zeroed: bool
    _whole: bool

    @staticmethod
    def __new__(
        cls,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        whole: bool = False,
    ) -> Waiting:
        """``whole``: as FSDP2 gets it, before it is cut up."""
        made: Waiting = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=dtype, device=device
        )
        made.before, made.zeroed, made._whole = None, False, whole
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if func in (_aten.zero_.default, _aten._foreach_zero_.default):
            for each in tree_leaves(first):
                each.zero() if isinstance(each, Waiting) else each.zero_()
            return None if isinstance(first, list) else first
        if isinstance(first, Waiting) and not first.zeroed:
            adds = func is _aten.add_.Tensor and isinstance(others[0], Waiting)
            if adds or func is _aten.detach.default or (first._whole and func is _aten.div_.Tensor):
                return first
            if func is _aten.as_strided.default:
                return Waiting(others[0], others[1], first.dtype, first.device)
            if func is _aten._to_copy.default:
                dtype = kwargs.get("dtype") or first.dtype
                device = kwargs.get("device") or first.device
                return Waiting(first.size(), first.stride(), dtype, device, whole=first._whole)
        return func(
            *tree_map_only(Waiting, Waiting.read, args),
            **tree_map_only(Waiting, Waiting.read, kwargs),
        )

    def zero(self) -> None:
        """Give up what waits."""
        self.zeroed = True
        self.before = torch.zeros(self.size(), dtype=self.dtype, device=self.device)

    def read(self) -> torch.Tensor:
        """The gradient, if it is known on this rank."""
        if not self.zeroed or self.before is None:
            raise RuntimeError(
                "the gradient is being summed up inside the node, and is not known before it has "
                "crossed nodes: read .grad after the backward under "
                "fcdp.accumulate(model, last=True)"
            )
        return self.before

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Waiting(size={tuple(self.size())}, zeroed={self.zeroed})"


def waiting_in(param: torch.Tensor) -> Waiting | None:
    """The waiting gradient in a sharded parameter's ``.grad``."""
    local = getattr(param.grad, "_local_tensor", None)
    return local if isinstance(local, Waiting) else None

"""Parameters of tensor classes that FSDP2 gathers by their own rules: packed and quantised ones.

What such a parameter sends is what its ``fsdp_pre_all_gather`` returns, and what it holds are the
tensors inside of it. The rest of the library knows plain tensors and these functions.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 gathers what a method of the tensor's class returns, in the tensor's place."""
    return hasattr(tensor, "fsdp_pre_all_gather")


def names_inside(tensor: torch.Tensor) -> list[str]:
    """Names of the plain tensors that hold a wrapper's values; of a plain tensor none.

    If one of them has the tensor's own shape and dtype, it alone: others follow from it, such as
    the scale that a tensor in full precision is going to be rounded by. A class may have the host
    wait for the device to list them.
    """
    found = _inside(tensor)
    own = tensor.shape, tensor.dtype
    same = [name for name, each in found.items() if (each.shape, each.dtype) == own]
    return same if len(same) == 1 else [*found]


def _inside(tensor: object) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    if is_traceable_wrapper_subclass(tensor):
        wrapper: Any = tensor
        for name in wrapper.__tensor_flatten__()[0]:
            each = getattr(wrapper, name)
            deeper = {f"{name}.{inner}": it for inner, it in _inside(each).items()}
            found.update(deeper or {name: each})
    return found


def held(tensor: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's values: those of ``names_inside``, or itself."""
    return [attrgetter(name)(tensor) for name in names] or [tensor.detach()]


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the plain tensors that hold a tensor's values."""
    return sum(each.nbytes for each in held(tensor, names_inside(tensor)))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank holds of a parameter, sharded or not."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether tensors of other shapes or dtypes hold a parameter's values, or several tensors."""
    local = local_of(tensor)
    inside = held(local, names_inside(local)) if is_extended(local) else [local]
    return [(each.shape, each.dtype) for each in inside] != [(local.shape, local.dtype)]


def coded(model: nn.Module) -> list[torch.Tensor]:
    """Weights whose elements are codes and no numbers, also where their dtype is one of numbers.

    bitsandbytes holds several codes in each element of ``bnb_4bit_quant_storage``, and how to read
    them in the module's ``quant_state``.
    """
    return [
        module.weight
        for module in model.modules()
        if getattr(module, "quant_state", None) is not None
        and isinstance(module.weight, torch.Tensor)
    ]


def opened(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Plain tensors, by name, that a parameter can be read from and written to on any rank.

    A plain one is that itself. Of a packed one they are those inside; several have numbers in
    their names, and those of other shapes are flat: one rank's behind another's.

    Raises ``ValueError`` for a packed one of which ranks hold unequal parts.
    """
    local = local_of(tensor)
    if not isinstance(tensor, DTensor) or not is_extended(local):
        return {name: tensor}
    mesh, inside = tensor.device_mesh, held(local, names_inside(local))
    parts = {name: inside[0]}
    if len(inside) > 1:
        parts = {f"{name}:{at}": each for at, each in enumerate(inside)}
    flat = any(each.shape != local.shape for each in inside)
    if flat and local.numel() * mesh.size() != tensor.numel():
        raise ValueError(
            f"{name}: is packed in a {type(local).__name__} of shape {tuple(tensor.shape)}; must "
            f"divide evenly by {mesh.size()} ranks to be written"
        )
    return {
        key: DTensor.from_local(
            each, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        if each.shape == local.shape
        else DTensor.from_local(each.view(-1), mesh, [Shard(0)] * mesh.ndim)
        for key, each in parts.items()
    }


def check_held(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for a wrapper around tensors that its class does not name.

    ``name`` is the parameter's. Nothing would show a write to them.
    """
    tensor = local_of(tensor)
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_extended(tensor) and wraps and not names_inside(tensor):
        raise ValueError(
            f"{name}: its tensor class {type(tensor).__name__} gathers by an FSDP2 extension and "
            "does not name the tensors inside of it, so that FCDP cannot see writes to them; give "
            "the class __tensor_flatten__ and __tensor_unflatten__, as torch.compile asks"
        )

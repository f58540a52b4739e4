"""Parameters of tensor classes that FSDP2 gathers by their own rules: packed and quantised ones.

What such a parameter sends is what its ``fsdp_pre_all_gather`` returns, and what it holds are the
tensors inside of it. The rest of the library knows plain tensors and these functions.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 gathers what a method of the tensor's class returns, in the tensor's place."""
    return hasattr(tensor, "fsdp_pre_all_gather")


def _names_inside(tensor: object) -> bool:
    """Whether a tensor's class names the tensors inside of it."""
    return is_traceable_wrapper_subclass(tensor)


def held(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's values: itself, or those inside of a wrapper."""
    if not _names_inside(tensor):
        return [tensor.detach()]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [each for name in names for each in held(getattr(wrapper, name))]


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the plain tensors that hold a tensor's values."""
    return sum(each.nbytes for each in held(tensor))


def opened(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Plain tensors, by name, that a parameter can be read from and written to on any rank.

    A plain one is that itself. Of a packed one: the tensor inside of it that has its shape and
    dtype, if there is one, as others then follow from it; else all that are inside, of which those
    of other shapes are flat: one rank's behind another's.

    Raises ``ValueError`` for a packed one of which ranks hold unequal parts.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not isinstance(tensor, DTensor) or not is_extended(local):
        return {name: tensor}
    mesh, inside = tensor.device_mesh, held(local)
    same = [each for each in inside if (each.shape, each.dtype) == (local.shape, local.dtype)]
    parts = {f"{name}:{at}": each for at, each in enumerate(inside)}
    if len(same) == 1:
        parts = {name: same[0]}
    elif local.numel() * mesh.size() != tensor.numel():
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
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_extended(tensor) and wraps and not _names_inside(tensor):
        raise ValueError(
            f"{name}: its tensor class {type(tensor).__name__} gathers by an FSDP2 extension and "
            "does not name the tensors inside of it, so that FCDP cannot see writes to them; give "
            "the class __tensor_flatten__ and __tensor_unflatten__, as torch.compile asks"
        )

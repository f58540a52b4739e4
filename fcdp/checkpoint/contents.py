"""Model and optimizer by names of parameters, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp.checkpoint.commit import SavedOptimizer


def split(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's parameters and buffers by their first name, and state that is no tensor.

    In between FSDP2 puts the sharded parameters back in place, which the optimizer knows.
    """
    state = model.state_dict(keep_vars=True)
    firsts = {id(value): name for name, value in reversed(state.items())}
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and firsts[id(value)] == name
    }
    return tensors, {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}


def groups_of(optimizer: Optimizer, params: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with names for parameters."""
    names = {id(param): name for name, param in params.items()}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"optimizer.param_groups[{index}]: holds a parameter of shape "
                    f"{tuple(param.shape)} that is not the model's; make the optimizer after "
                    "fcdp.shard, of model.parameters()"
                )
    return [
        {**group, "params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def names_of(groups: Sequence[dict[str, Any]]) -> list[str]:
    return [name for group in groups for name in group["params"]]


def numbered(groups: Sequence[dict[str, Any]], saved: SavedOptimizer) -> dict[str, Any]:
    """The state dict that the optimizer of ``groups`` takes, which knows parameters by number."""
    numbers = {name: number for number, name in enumerate(names_of(groups))}
    return {
        "state": {numbers[name]: state for name, state in saved.state.items() if state},
        "param_groups": [
            {**other, "params": [numbers[name] for name in group["params"]]}
            for group, other in zip(groups, saved.param_groups, strict=True)
        ],
    }


def empty(saved: TensorStorageMetadata, param: torch.Tensor) -> torch.Tensor:
    """Room for one tensor of an optimizer's state: see ``check_layout``."""
    if saved.size == param.shape:
        return torch.empty_like(param, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def kind_of(optimizer: Optimizer) -> str:
    """Module and name of the optimizer's class, below wrappers such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check_layout(entry: str, value: torch.Tensor, name: str, param: torch.Tensor) -> None:
    """Only what is laid out like the parameter, or the same everywhere, can be sharded anew."""
    like_param = value.shape == param.shape and isinstance(value, DTensor) == isinstance(
        param, DTensor
    )
    if not like_param and (value.ndim > 0 or isinstance(value, DTensor)):
        raise ValueError(
            f"optimizer: its state {entry!r} of {name}, a {type(value).__name__} of shape "
            f"{tuple(value.shape)}, cannot be saved; must be a scalar or sharded like the "
            f"parameter, of shape {tuple(param.shape)}"
        )


def check_same_tensors(ours: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    of_model = [key for key in saved if key.startswith("model.")]
    check_same_names("model", ours, of_model)
    for key, tensor in ours.items():
        if saved[key].size != tensor.shape:
            raise ValueError(
                f"{key.removeprefix('model.')}: has shape {tuple(saved[key].size)} in the "
                f"checkpoint; must be {tuple(tensor.shape)}, the model's"
            )


def check_same_kind(ours: Optimizer, saved: SavedOptimizer) -> None:
    """A class counts by its name alone if one side found it in the script that was started."""
    kind, main = kind_of(ours), "__main__."
    same = kind == saved.kind
    if kind.startswith(main) or saved.kind.startswith(main):
        same = kind.rpartition(".")[2] == saved.kind.rpartition(".")[2]
    if not same:
        raise ValueError(
            f"optimizer: the checkpoint has the state of one of class {saved.kind}; "
            f"must be {kind}, as the one to load into"
        )


def check_same_groups(ours: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    if len(ours) != len(saved):
        raise ValueError(
            f"optimizer: the checkpoint has {len(saved)} parameter groups; must be {len(ours)}"
        )
    for index, (group, other) in enumerate(zip(ours, saved, strict=True)):
        check_same_names(f"optimizer.param_groups[{index}]", group["params"], other["params"])


def check_same_names(what: str, ours: Any, saved: Any) -> None:
    missing, unexpected = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if missing or unexpected:
        raise ValueError(
            f"{what}: the checkpoint lacks {_some(missing)} and has {_some(unexpected)} besides; "
            "must hold the same parameters"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name.removeprefix("model.") for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"

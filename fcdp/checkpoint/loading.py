"""Reading a checkpoint, once all of it is known to be as it was saved."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from fcdp.checkpoint.commit import Commit, SavedOptimizer, read_commit
from fcdp.checkpoint.files import check_files
from fcdp.checkpoint.saving import (
    background_of,
    groups_of,
    kind_of,
    names_of,
    split,
    tensors_of,
    why,
)
from fcdp.durable import COMMIT
from fcdp.engine import engine_of


def load(model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> Any:
    """Read what ``save`` wrote into ``model`` and ``optimizer``. Collective, between steps.

    World size and topology may differ from those of the save. Units that it changes are stale
    afterwards. Nothing but tensors and plain containers is ever unpickled.

    All files are compared with their checksums first. Each rank reads 1/W of the checkpoint for
    that, mostly what it then loads anyway, and from memory if it fits there: 0.6 s per GB and rank
    on one core, less where up to four are free.

    Args:
        model: A cached model with the parameters of the one that was saved, by name and shape.
        optimizer: Of its parameters, of the saved one's class and parameter groups.
        directory: What ``save`` was given.

    Returns:
        The ``extra`` of the save; its tensors are on the CPU.

    Raises:
        ValueError: On every rank, leaving model and optimizer as they were, for a directory without
            a checkpoint; for a damaged one, naming the file and what is wrong with it; for one that
            a version of FCDP without checksums wrote; and for one of other parameters, shapes,
            parameter groups or another class of optimizer. Should the storage fail between check
            and use, they are no longer as they were.

    Example:
        >>> fcdp.save(model, optimizer, directory).result()
        >>> fcdp.load(model, optimizer, directory) is None  # no extra
        True
    """
    engine = engine_of(model)
    background = background_of(engine.topology)
    background.settle()
    where = Path(directory)
    # One rank reads it: others, on nodes that do not share the directory, might find another one.
    group, topology = background.group, engine.topology
    data = [background.agree(lambda: read_commit(where) if group.rank() == 0 else b"")]
    dist.broadcast_object_list(data, src=0, group=group)
    commit, tensors, of_model, of_optimizer = background.agree(
        lambda: _plan(model, optimizer, Commit.parse(data[0], where / COMMIT))
    )
    shards, layout = where / commit.shards, commit.layout
    background.agree(
        lambda: check_files(shards, layout.files, part=topology.rank, parts=topology.world_size)
    )
    engine.staleness.doubt()
    try:
        reader = _Reader(shards, layout.metadata)
        state_dict_loader.load(tensors, storage_reader=reader, process_group=group)
    except CheckpointException as failure:
        raise ValueError(f"{shards}: cannot be read: {why(failure)}") from failure
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    return commit.extra


class _Reader(FileSystemReader):
    """Reads shards by our own description of them, not by the pickled one beside them."""

    def __init__(self, shards: Path, metadata: Metadata) -> None:
        super().__init__(shards)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _plan(
    model: nn.Module, optimizer: Optimizer, commit: Commit
) -> tuple[Commit, dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The commit, tensors by key in the shards, and state dicts of model and optimizer.

    The state dicts hold these same tensors, which are filled in place, and what is not sharded.
    Raises ``ValueError`` for a checkpoint that does not fit.
    """
    metadata, saved = commit.layout.tensors, commit.optimizer
    params, rest = split(model)
    tensors = tensors_of(params)
    _check_same_tensors(tensors, metadata)
    _check_same_names("model", rest, commit.model)
    whole = {**model.state_dict(), **commit.model}

    _check_same_kind(optimizer, saved)
    groups = groups_of(optimizer, params)
    _check_same_groups(groups, saved.param_groups)
    for name, state in saved.state.items():
        for entry in state:
            key = f"optimizer.{name}.{entry}"
            if key in metadata:
                state[entry] = tensors[key] = _empty(metadata[key], params[name])
    return commit, tensors, whole, _numbered(groups, saved)


def _numbered(groups: Sequence[dict[str, Any]], saved: SavedOptimizer) -> dict[str, Any]:
    """The state dict that the optimizer of ``groups`` takes, which knows parameters by number."""
    numbers = {name: number for number, name in enumerate(names_of(groups))}
    return {
        "state": {numbers[name]: state for name, state in saved.state.items() if state},
        "param_groups": [
            {**other, "params": [numbers[name] for name in group["params"]]}
            for group, other in zip(groups, saved.param_groups, strict=True)
        ],
    }


def _empty(saved: TensorStorageMetadata, param: torch.Tensor) -> torch.Tensor:
    """Room for one tensor of an optimizer's state: as the save has checked."""
    if saved.size == param.shape:
        return torch.empty_like(param, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def _check_same_tensors(ours: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    of_model = [key for key in saved if key.startswith("model.")]
    _check_same_names("model", ours, of_model)
    for key, tensor in ours.items():
        if saved[key].size != tensor.shape:
            raise ValueError(
                f"{key.removeprefix('model.')}: has shape {tuple(saved[key].size)} in the "
                f"checkpoint; must be {tuple(tensor.shape)}, the model's"
            )


def _check_same_kind(ours: Optimizer, saved: SavedOptimizer) -> None:
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


def _check_same_groups(ours: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    if len(ours) != len(saved):
        raise ValueError(
            f"optimizer: the checkpoint has {len(saved)} parameter groups; must be {len(ours)}"
        )
    for index, (group, other) in enumerate(zip(ours, saved, strict=True)):
        _check_same_names(f"optimizer.param_groups[{index}]", group["params"], other["params"])


def _check_same_names(what: str, ours: Any, saved: Any) -> None:
    missing, unexpected = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if missing or unexpected:
        raise ValueError(
            f"{what}: the checkpoint lacks {_some(missing)} and has {_some(unexpected)} besides; "
            "must hold the same parameters"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name.removeprefix("model.") for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"

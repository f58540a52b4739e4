"""Reading a checkpoint, once all of it is known to be as it was saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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

from fcdp.agreement import on_all_ranks
from fcdp.checkpoint.commit import Commit, SavedOptimizer, read_commit
from fcdp.checkpoint.files import check_files
from fcdp.checkpoint.held import Held, Part
from fcdp.checkpoint.saving import (
    background_of,
    groups_of,
    kind_of,
    merged,
    names_of,
    split,
    tensors_of,
    why,
)
from fcdp.durable import COMMIT


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
    return load_held(Held.whole(model, optimizer), directory)


def load_held(held: Held, directory: str | os.PathLike[str]) -> Any:
    """Read what ``save`` or ``save_held`` wrote into the parts that this rank holds.

    Collective over ``held.topology``: every rank calls. Returns and raises what ``load`` does.
    """
    topology, background = held.topology, background_of(held.topology)
    background.settle()
    where, group = Path(directory), background.group
    what = f"directory = {where}"
    # One rank reads it: others, on nodes that do not share the directory, might find another one.
    data = [on_all_ranks(what, group, lambda: read_commit(where) if group.rank() == 0 else b"")]
    dist.broadcast_object_list(data, group_src=0, group=group)
    own = on_all_ranks(what, group, lambda: [_Outline.of(part) for part in held.parts])
    outlines = held.gathered(own)

    def plan() -> tuple[Commit, dict[str, torch.Tensor], list[_States]]:
        commit = Commit.parse(data[0], where / COMMIT)
        _Outline.united([*chain.from_iterable(outlines)]).check(commit)
        return commit, *_room(held.parts, commit)

    commit, tensors, states = on_all_ranks(what, group, plan)
    shards, layout = where / commit.shards, commit.layout
    on_all_ranks(
        what,
        group,
        lambda: check_files(shards, layout.files, part=topology.rank, parts=topology.world_size),
    )
    for part in held.parts:
        if part.engine is not None:
            part.engine.staleness.doubt()
    try:
        reader = _Reader(shards, layout.metadata)
        state_dict_loader.load(tensors, storage_reader=reader, process_group=group)
    except CheckpointException as failure:
        raise ValueError(f"{shards}: cannot be read: {why(failure)}") from failure
    for part, (of_model, of_optimizer) in zip(held.parts, states, strict=True):
        part.model.load_state_dict(of_model)
        part.optimizer.load_state_dict(of_optimizer)
    return commit.extra


class _Reader(FileSystemReader):
    """Reads shards by our own description of them, not by the pickled one beside them."""

    def __init__(self, shards: Path, metadata: Metadata) -> None:
        super().__init__(shards)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@dataclass(frozen=True)
class _Outline:
    """Names and shapes of a model, or of parts of it, and its optimizer without what it keeps."""

    #: Shapes by key in the shards, and names of what is no tensor.
    shapes: dict[str, torch.Size]
    others: list[str]
    optimizer: SavedOptimizer

    @classmethod
    def of(cls, part: Part) -> _Outline:
        params, rest = split(part.model)
        shapes = {key: tensor.shape for key, tensor in tensors_of(params).items()}
        groups = groups_of(part.optimizer, params)
        return cls(shapes, [*rest], SavedOptimizer(kind_of(part.optimizer), {}, groups))

    @classmethod
    def united(cls, parts: Sequence[_Outline]) -> _Outline:
        others = [*chain.from_iterable(part.others for part in parts)]
        optimizer = SavedOptimizer.united([part.optimizer for part in parts])
        return cls(merged(part.shapes for part in parts), others, optimizer)

    def check(self, commit: Commit) -> None:
        """Raise ``ValueError`` for a checkpoint that does not fit."""
        _check_same_tensors(self.shapes, commit.layout.tensors)
        _check_same_names("model", self.others, commit.model)
        _check_same_kind(self.optimizer.kind, commit.optimizer.kind)
        _check_same_groups(self.optimizer.param_groups, commit.optimizer.param_groups)


#: State dicts of a model and of its optimizer.
_States = tuple[dict[str, Any], dict[str, Any]]


def _room(parts: Sequence[Part], commit: Commit) -> tuple[dict[str, torch.Tensor], list[_States]]:
    """Tensors to read, by key in the shards, and by part state dicts, for after they are read.

    The state dicts hold these same tensors, which are filled in place, and what is not sharded.
    """
    tensors: dict[str, torch.Tensor] = {}
    states: list[_States] = []
    for part in parts:
        params, rest = split(part.model)
        tensors |= tensors_of(params)
        of_model = {**part.model.state_dict(), **{name: commit.model[name] for name in rest}}
        groups = groups_of(part.optimizer, params)
        kept = {name: dict(commit.optimizer.state.get(name, {})) for name in names_of(groups)}
        for name, state in kept.items():
            for entry in state:
                key = f"optimizer.{name}.{entry}"
                if (saved := commit.layout.tensors.get(key)) is not None:
                    state[entry] = tensors[key] = _empty(saved, params[name])
        states.append((of_model, _numbered(groups, kept, commit.optimizer.param_groups)))
    return tensors, states


def _numbered(
    groups: Sequence[dict[str, Any]],
    kept: Mapping[str, dict[str, Any]],
    saved: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The state dict that the optimizer of ``groups`` takes, which knows parameters by number.

    ``kept`` is its state by name, and ``saved`` groups have the settings.
    """
    numbers = {name: number for number, name in enumerate(names_of(groups))}
    return {
        "state": {numbers[name]: state for name, state in kept.items() if state},
        "param_groups": [
            {**other, "params": [numbers[name] for name in group["params"]]}
            for group, other in zip(groups, saved, strict=True)
        ],
    }


def _empty(saved: TensorStorageMetadata, param: torch.Tensor) -> torch.Tensor:
    """Room for one tensor of an optimizer's state: as the save has checked."""
    if saved.size == param.shape:
        return torch.empty_like(param, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def _check_same_tensors(ours: Mapping[str, torch.Size], saved: Mapping[str, Any]) -> None:
    of_model = [key for key in saved if key.startswith("model.")]
    _check_same_names("model", ours, of_model)
    for key, shape in ours.items():
        if saved[key].size != shape:
            raise ValueError(
                f"{key.removeprefix('model.')}: has shape {tuple(saved[key].size)} in the "
                f"checkpoint; must be {tuple(shape)}, the model's"
            )


def _check_same_kind(ours: str, saved: str) -> None:
    """A class counts by its name alone if one side found it in the script that was started."""
    main = "__main__."
    same = ours == saved
    if ours.startswith(main) or saved.startswith(main):
        same = ours.rpartition(".")[2] == saved.rpartition(".")[2]
    if not same:
        raise ValueError(
            f"optimizer: the checkpoint has the state of one of class {saved}; "
            f"must be {ours}, as the one to load into"
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

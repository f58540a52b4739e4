"""Reading a checkpoint, once all of it is known to be as it was saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from fcdp.checkpoint.background import background_of
from fcdp.checkpoint.commit import Commit, read_commit
from fcdp.checkpoint.contents import (
    check_same_groups,
    check_same_kind,
    check_same_names,
    check_same_tensors,
    empty,
    groups_of,
    numbered,
    split,
)
from fcdp.checkpoint.files import check_files
from fcdp.checkpoint.saving import why
from fcdp.durable import COMMIT
from fcdp.engine import engine_of


def load(model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> Any:
    """Read what ``save`` wrote into ``model`` and ``optimizer``. Collective, between steps.

    World size and topology may differ from those of the save. Everything cached counts as stale
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
    data = background.from_rank_0(lambda: read_commit(where))
    plan = background.agree(lambda: _plan(model, optimizer, Commit.parse(data, where / COMMIT)))
    shards = where / plan.commit.shards
    topology = engine.topology
    background.agree(
        lambda: check_files(
            shards, plan.commit.layout.files, part=topology.rank, parts=topology.world_size
        )
    )
    try:
        reader = _Reader(shards, plan.commit.layout.metadata)
        state_dict_loader.load(plan.tensors, storage_reader=reader, process_group=background.group)
    except CheckpointException as failure:
        raise ValueError(f"{shards}: cannot be read: {why(failure)}") from failure
    finally:
        engine.staleness.invalidate()
    model.load_state_dict(plan.model)
    optimizer.load_state_dict(plan.optimizer)
    return plan.commit.extra


class _Reader(FileSystemReader):
    """Reads shards by our own description of them, not by the pickled one beside them."""

    def __init__(self, shards: Path, metadata: Metadata) -> None:
        super().__init__(shards)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


@dataclass(frozen=True)
class _Plan:
    """Tensors and state to read, and where they go."""

    commit: Commit
    #: By key in the shards; filled in place.
    tensors: dict[str, torch.Tensor]
    #: State dicts that hold these same tensors, and what is not sharded.
    model: dict[str, Any]
    optimizer: dict[str, Any]


def _plan(model: nn.Module, optimizer: Optimizer, commit: Commit) -> _Plan:
    """Raises ``ValueError`` for a checkpoint that does not fit."""
    metadata, saved = commit.layout.tensors, commit.optimizer
    params, rest = split(model)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in params.items()}
    check_same_tensors(tensors, metadata)
    check_same_names("model", rest, commit.model)
    whole = {**model.state_dict(), **commit.model}

    check_same_kind(optimizer, saved)
    groups = groups_of(optimizer, params)
    check_same_groups(groups, saved.param_groups)
    for name, state in saved.state.items():
        for entry in state:
            key = f"optimizer.{name}.{entry}"
            if key in metadata:
                state[entry] = tensors[key] = empty(metadata[key], params[name])
    return _Plan(commit, tensors, whole, numbered(groups, saved))

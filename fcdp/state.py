"""Checkpoints of model and optimizer, by torch.distributed.checkpoint.

A checkpoint is a directory: one folder of shards, written by all ranks, and ``state.pt``, which
names the folder and holds what is not sharded. Replacing that file is what completes a save. Until
then the checkpoint that was there before is the one that counts.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp.engine import engine_of, on_all_ranks
from fcdp.topology import Topology

_COMMIT = "state.pt"
_SHARDS = "shards-"


def save(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    *,
    extra: Any = None,
    asynchronous: bool = False,
) -> Future[None]:
    """Write a checkpoint that :func:`load` reads at any world size. Collective: every rank calls.

    ``directory`` must be on a file system that all nodes share. A checkpoint that it holds already
    is replaced at once when the new one is complete, and stays if the save fails; other files in
    it are left alone. ``extra`` is whatever else a resumed run needs, such as the scheduler's
    state and the position in the data: tensors, numbers, strings, None, and lists, tuples and
    dicts of these. Rank 0's is kept. Save between steps: gradients are not kept, nor is what
    ``error_feedback`` has held back: with it, a resumed run is not the same bit for bit.

    The returned future is done already, unless ``asynchronous``: then training may go on while a
    thread writes a copy of the state as it is now, made in host memory. Saves are written one
    after the other. Call ``result()`` on every rank before the process group is destroyed; it
    raises what went wrong.

    Raises ``ValueError`` for an ``extra`` or an optimizer state that cannot be kept, and
    ``RuntimeError`` on every rank if any rank could not write.
    """
    topology = engine_of(model).topology
    background = _background(topology)
    shards = Path(directory) / _new_name()
    tensors, state = on_all_ranks(
        "extra, optimizer", topology, lambda: _snapshot(model, optimizer, shards.name, extra)
    )
    writer = _Writer(shards, state)
    if not asynchronous:
        background.settle()
        _write(tensors, writer, background.group)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    staged = DefaultStager(options).stage(tensors)
    assert isinstance(staged, dict)  # not a future: staging itself is not asynchronous
    return background.thread.submit(_write, staged, writer, background.group)


def load(model: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> Any:
    """Read what :func:`save` wrote into ``model`` and ``optimizer``; return its ``extra``.

    World size and topology may differ from those of the save. Collective: every rank calls it,
    between steps. Everything cached counts as stale afterwards. Tensors in ``extra`` are on the
    CPU. Nothing but tensors and plain containers is unpickled from ``state.pt``, but PyTorch itself
    pickles the description of the shards (``.metadata``): load only what you trust.

    Raises ``ValueError`` for a directory without a checkpoint, and for one of other parameters,
    shapes or parameter groups; model and optimizer are then as they were. Raises ``RuntimeError``
    if shards cannot be read; then they are not.
    """
    engine = engine_of(model)
    background = _background(engine.topology)
    background.settle()
    plan = on_all_ranks(
        f"directory = {directory}",
        engine.topology,
        lambda: _plan(model, optimizer, Path(directory)),
    )
    try:
        reader = FileSystemReader(plan.shards)
        state_dict_loader.load(plan.tensors, storage_reader=reader, process_group=background.group)
    except CheckpointException as failure:
        raise RuntimeError(f"directory = {directory}: cannot be read: {_why(failure)}") from failure
    finally:
        engine.staleness.invalidate()
    model.load_state_dict(plan.model)
    optimizer.load_state_dict(plan.optimizer)
    return plan.extra


@dataclass(frozen=True)
class _Plan:
    """What to read, and where it goes."""

    shards: Path
    #: By key in the shards; filled in place.
    tensors: dict[str, torch.Tensor]
    #: State dicts that hold these same tensors, and what is not sharded.
    model: dict[str, Any]
    optimizer: dict[str, Any]
    extra: Any


class _Background:
    """What all saves and loads of a topology share.

    They exchange in a group of their own, because training goes on in the others; and what they do
    is done in one order on every rank, because that group is one.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fcdp-save")

    def settle(self) -> None:
        """Wait for the saves under way, whose futures tell how they went."""
        self.thread.submit(lambda: None).result()


_backgrounds: WeakKeyDictionary[Topology, _Background] = WeakKeyDictionary()


def _background(topology: Topology) -> _Background:
    if topology not in _backgrounds:
        _backgrounds[topology] = _Background()
    return _backgrounds[topology]


class _Writer(FileSystemWriter):
    """Writes shards into a folder of their own; completes the save when every rank has written."""

    def __init__(self, shards: Path, state: bytes) -> None:
        super().__init__(shards)
        self.shards = shards
        self._state = state

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0, and only once all shards are on disk."""
        super().finish(metadata, results)
        with open(self.shards / _COMMIT, "wb") as file:
            file.write(self._state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self.shards.parent / _COMMIT)
        for other in self.shards.parent.glob(f"{_SHARDS}*"):
            if other != self.shards:
                shutil.rmtree(other, ignore_errors=True)


def _write(tensors: dict[str, Any], writer: _Writer, group: dist.ProcessGroup) -> None:
    try:
        state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as failure:
        if dist.get_rank(group) == 0:
            shutil.rmtree(writer.shards, ignore_errors=True)
        where = writer.shards.parent
        raise RuntimeError(f"directory = {where}: cannot be written: {_why(failure)}") from failure


def _why(failure: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failure.failures.items())


def _new_name() -> str:
    """A name for a folder, which all ranks agree on."""
    names = [f"{_SHARDS}{uuid4().int >> 96:08x}"]
    dist.broadcast_object_list(names)  # all ranks: tensor-parallel shards go to one checkpoint
    return names[0]


def _snapshot(
    model: nn.Module, optimizer: Optimizer, shards: str, extra: Any
) -> tuple[dict[str, torch.Tensor], bytes]:
    """What the shards will hold, by reference, and a copy of all else."""
    params, rest = _split(model)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in params.items()}
    groups = _groups(optimizer, params)
    kept: dict[str, dict[str, Any]] = {}
    for name in _names(groups):
        kept[name] = {}
        for entry, value in optimizer.state.get(params[name], {}).items():
            kept[name][entry] = value
            if isinstance(value, torch.Tensor):
                _check_layout(entry, value, name, params[name])
                tensors[f"optimizer.{name}.{entry}"] = value.detach()
                kept[name][entry] = None
    state = {
        "shards": shards,
        "model": rest,
        "optimizer": {"state": kept, "param_groups": groups},
        "extra": extra,
    }
    return tensors, _serialised(state)


def _plan(model: nn.Module, optimizer: Optimizer, directory: Path) -> _Plan:
    if not (directory / _COMMIT).is_file():
        raise ValueError(
            f"directory = {directory}: holds no complete checkpoint ({_COMMIT} is missing); "
            "must be one that fcdp.save wrote, on a file system that all nodes share"
        )
    state = torch.load(directory / _COMMIT, weights_only=True, map_location="cpu")
    shards = directory / state["shards"]
    metadata: dict[str, Any] = FileSystemReader(shards).read_metadata().state_dict_metadata

    params, rest = _split(model)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in params.items()}
    _check_same_tensors(tensors, metadata)
    _check_same_names("model", rest, state["model"])
    whole = {**model.state_dict(), **state["model"]}

    groups, saved = _groups(optimizer, params), state["optimizer"]
    _check_same_groups(groups, saved["param_groups"])
    for name, kept in saved["state"].items():
        for entry in kept:
            key = f"optimizer.{name}.{entry}"
            if key in metadata:
                kept[entry] = tensors[key] = _empty(metadata[key], params[name])
    return _Plan(shards, tensors, whole, _numbered(groups, saved), state["extra"])


def _split(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
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


def _groups(optimizer: Optimizer, params: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
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


def _names(groups: Sequence[dict[str, Any]]) -> list[str]:
    return [name for group in groups for name in group["params"]]


def _numbered(groups: Sequence[dict[str, Any]], saved: dict[str, Any]) -> dict[str, Any]:
    """The state dict that the optimizer of ``groups`` takes, which knows parameters by number."""
    numbers = {name: number for number, name in enumerate(_names(groups))}
    return {
        "state": {numbers[name]: kept for name, kept in saved["state"].items() if kept},
        "param_groups": [
            {**other, "params": [numbers[name] for name in group["params"]]}
            for group, other in zip(groups, saved["param_groups"], strict=True)
        ],
    }


def _empty(saved: TensorStorageMetadata, param: torch.Tensor) -> torch.Tensor:
    """Room for one tensor of an optimizer's state: see ``_check_layout``."""
    if saved.size == param.shape:
        return torch.empty_like(param, dtype=saved.properties.dtype, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _serialised(state: dict[str, Any]) -> bytes:
    """Raises ``ValueError`` for what could not be read back without unpickling code."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (UnpicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "extra (or what the model and the optimizer keep beside tensors): must be tensors, "
            f"numbers, strings, None, and lists, tuples and dicts of these: {error}"
        ) from error
    return file.getvalue()


def _check_layout(entry: str, value: torch.Tensor, name: str, param: torch.Tensor) -> None:
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


def _check_same_tensors(ours: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    of_model = [key for key in saved if key.startswith("model.")]
    _check_same_names("model", ours, of_model)
    for key, tensor in ours.items():
        if saved[key].size != tensor.shape:
            raise ValueError(
                f"{key.removeprefix('model.')}: has shape {tuple(saved[key].size)} in the "
                f"checkpoint; must be {tuple(tensor.shape)}, the model's"
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

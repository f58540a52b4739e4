"""Writing a checkpoint beside the one that counts, which it replaces when it is complete."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.futures
import torch.nn as nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp.agreement import check_names, on_all_ranks
from fcdp.checkpoint.commit import Commit, Layout, SavedOptimizer, copied
from fcdp.checkpoint.files import Checksum, SummingFileSystem
from fcdp.checkpoint.held import Held, Part
from fcdp.extensions import opened
from fcdp.topology import Topology, new_group

_SHARDS = "shards-"
_METADATA = ".metadata"
#: Longer than another program writes a commit; NFS may keep a lost node's lock for ever.
_LOCK_S = 30.0

_T = TypeVar("_T")


def save(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    *,
    extra: Any = None,
    asynchronous: bool = False,
) -> Future[None]:
    """Write a checkpoint that ``load`` reads at any world size. Collective: every rank calls.

    Save between steps: gradients are not kept, nor is what ``error_feedback`` has held back: with
    it, a resumed run is not the same bit for bit. Saves are written one after the other.

    Args:
        model: A cached model.
        optimizer: Of the model's parameters, whichever class it has.
        directory: On a file system that all nodes share. A checkpoint that it holds already is
            replaced at once when the new one is complete, and stays if the save fails; other files
            in it are left alone.
        extra: Whatever else a resumed run needs, such as the scheduler's state and the position in
            the data: tensors, numbers, strings, None, and lists, tuples and dicts of these. Rank
            0's is kept.
        asynchronous: Let training go on while a thread writes a copy of the state as it is now,
            made in host memory.

    Returns:
        A future, done already unless ``asynchronous``. Call ``result()`` on every rank before the
        process group is destroyed; it raises what went wrong.

    Raises:
        ValueError: For an ``extra`` or an optimizer state that cannot be kept; on every rank, for
            a model of which ranks have other names, or other values under one name.
        RuntimeError: On every rank if any rank could not write, or had no memory for a copy.

    Example:
        >>> saving = fcdp.save(model, optimizer, directory, extra={"step": 7}, asynchronous=True)
        >>> saving.result()  # before the process group is destroyed
        >>> fcdp.load(model, optimizer, directory)
        {'step': 7}
    """
    held = Held.whole(model, optimizer)
    return save_held(held, directory, extra=extra, asynchronous=asynchronous)


def save_held(
    held: Held, directory: str | os.PathLike[str], *, extra: Any = None, asynchronous: bool = False
) -> Future[None]:
    """Write what ``save`` writes, of a model of which each rank may hold other parts.

    Collective over ``held.topology``: every rank calls. Raises what ``save`` raises.
    """
    for part in held.parts:
        if part.engine is not None:
            part.engine.controller.conclude()
            if held.group is None:  # stages of a pipeline have names of their own, which are united
                check_names(split(part.model)[0], held.topology)
    background = background_of(held.topology)
    names = [f"{_SHARDS}{uuid4().int >> 96:08x}"]
    # Over another group: that of the background may be busy with the save before.
    dist.broadcast_object_list(names, group_src=0, group=background.foreground)
    shards = Path(directory) / names[0]
    tensors, own, kept = on_all_ranks(
        "extra, optimizer", held.topology, lambda: _snapshot(held.parts, extra)
    )
    others, optimizers = zip(*held.gathered(own), strict=True)
    model, optimizer = merged(others), SavedOptimizer.united(optimizers)
    writer = _Writer(shards, {"model": model, "optimizer": optimizer, "extra": kept})
    if not asynchronous:
        background.settle()
        _write(tensors, writer, background.group)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    staged = on_all_ranks(
        "asynchronous",
        held.topology,
        lambda: {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()},
    )
    return background.thread.submit(_write, staged, writer, background.group)


class _Writer(FileSystemWriter):
    """Writes shards into a folder of their own; completes the save when every rank has written."""

    def __init__(self, shards: Path, state: dict[str, Any]) -> None:
        super().__init__(shards)
        self.shards = shards
        self._state = state
        self.fs: SummingFileSystem = SummingFileSystem()

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's shards. Their checksums travel to rank 0 among the results."""
        written = super().write_data(plan, planner)
        sums = [
            WriteResult(MetadataIndex(name), checksum.size, checksum)
            for name, checksum in self.fs.sums.items()
        ]
        return written.then(lambda results: [*results.value(), *sums])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the save; called on rank 0, once all shards are on disk."""
        files: dict[str, Checksum] = {}
        chunks: list[WriteResult] = []
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, Checksum):
                files[result.index.fqn] = result.storage_data
            else:
                chunks.append(result)
        # Two programs that save here by mistake remove nothing that a ``state.pt`` names.
        with (self.shards.parent / ".lock").open("w") as file:
            _lock(file)
            for name in files:
                if not (path := self.shards / name).exists():
                    where = "is not there for rank 0; must be on a file system that all nodes share"
                    raise FileNotFoundError(f"{path}: {where}")
            # Not every PyTorch's writer completes the metadata that it is given.
            metadata.storage_data = {chunk.index: chunk.storage_data for chunk in chunks}
            super().finish(metadata, [chunks])
            files[_METADATA] = self.fs.sums[_METADATA]
            commit = Commit(self.shards.name, Layout(files, metadata), **self._state)
            commit.write(self.shards.parent)
            for other in {*self.shards.parent.glob(f"{_SHARDS}*")} - {self.shards}:
                shutil.rmtree(other, ignore_errors=True)


def _lock(file: IO[str]) -> None:
    """Lock ``file`` until it is closed, unless its file system cannot, or a lost node holds it."""
    ends = time.monotonic() + _LOCK_S
    while time.monotonic() < ends:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return


def _write(tensors: dict[str, Any], writer: _Writer, group: dist.ProcessGroup) -> None:
    try:
        state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as failure:
        if dist.get_rank(group) == 0:
            shutil.rmtree(writer.shards, ignore_errors=True)
        where = writer.shards.parent
        raise RuntimeError(f"directory = {where}: cannot be written: {why(failure)}") from failure


def why(failure: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failure.failures.items())


def _snapshot(
    parts: Sequence[Part], extra: Any
) -> tuple[dict[str, torch.Tensor], tuple[dict[str, Any], SavedOptimizer], Any]:
    """Tensors that the shards will hold, by reference, and a copy of all else for the commit.

    The latter is of the model, of the optimizer, and ``extra``.
    """
    tensors: dict[str, torch.Tensor] = {}
    others, optimizers = [], []
    for part in parts:
        params, rest = split(part.model)
        moments, optimizer = _snapshot_of(part.optimizer, params)
        tensors |= tensors_of(params) | moments
        others.append(rest)
        optimizers.append(optimizer)
    saved = vars(SavedOptimizer.united(optimizers))
    copy = copied({"model": merged(others), "optimizer": saved, "extra": extra})
    return tensors, (copy["model"], SavedOptimizer(**copy["optimizer"])), copy["extra"]


def _snapshot_of(
    optimizer: Optimizer, params: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], SavedOptimizer]:
    """Tensors of an optimizer's state, by reference, and all else of it."""
    tensors: dict[str, torch.Tensor] = {}
    groups = groups_of(optimizer, params)
    states: dict[str, dict[str, Any]] = {}
    for name in names_of(groups):
        states[name] = {}
        for entry, value in optimizer.state.get(params[name], {}).items():
            states[name][entry] = value
            if isinstance(value, torch.Tensor):
                _check_layout(value, params[name], what=f"state {entry!r} of {name}")
                tensors[f"optimizer.{name}.{entry}"] = value.detach()
                states[name][entry] = None
    return tensors, SavedOptimizer(kind_of(optimizer), states, groups)


def merged(parts: Iterable[Mapping[str, _T]]) -> dict[str, _T]:
    """All entries of several parts, which have equal values for a name that two of them have."""
    return {name: value for part in parts for name, value in part.items()}


def tensors_of(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors by their keys in the shards, by reference; packed ones in their parts."""
    parts = (opened(f"model.{name}", tensor) for name, tensor in params.items())
    return {key: each.detach() for part in parts for key, each in part.items()}


def split(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's parameters and buffers by their first name, and state that is no tensor.

    As it lists them, FSDP2 puts the sharded parameters, which the optimizer knows, back in place.
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


def kind_of(optimizer: Optimizer) -> str:
    """Module and name of the optimizer's class, below wrappers such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _check_layout(value: torch.Tensor, param: torch.Tensor, *, what: str) -> None:
    """Raise ``ValueError`` for optimizer state that cannot be sharded anew.

    It must be laid out like its parameter, or be the same everywhere. ``what`` names it.
    """
    like_param = value.shape == param.shape and isinstance(value, DTensor) == isinstance(
        param, DTensor
    )
    if not like_param and (value.ndim > 0 or isinstance(value, DTensor)):
        raise ValueError(
            f"optimizer: its {what}, a {type(value).__name__} of shape "
            f"{tuple(value.shape)}, cannot be saved; must be a scalar or sharded like the "
            f"parameter, of shape {tuple(param.shape)}"
        )


class Background:
    """A process group and a thread for saves and loads, as training goes on in other groups.

    Saves and loads have one order on every rank, because they share that group.
    """

    def __init__(self, topology: Topology) -> None:
        # Ranks of other dimensions of its mesh hold parts of the model too, as of tensor
        # parallelism; ranks of the world outside of it, such as those that serve a model, do not.
        ranks = topology.mesh._get_root_mesh().mesh.flatten().tolist()
        whole = len(ranks) == dist.get_world_size()
        self.group = (
            dist.new_group(backend="gloo") if whole else new_group(ranks, "gloo", use="save")
        )
        #: The same ranks, for what each save begins with.
        self.foreground = dist.group.WORLD if whole else new_group(ranks, "gloo", use="save")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fcdp-save")

    def settle(self) -> None:
        """Wait for the saves under way, whose futures have their errors."""
        self.thread.submit(lambda: None).result()


_backgrounds: WeakKeyDictionary[Topology, Background] = WeakKeyDictionary()


def background_of(topology: Topology) -> Background:
    if topology not in _backgrounds:
        _backgrounds[topology] = Background(topology)
    return _backgrounds[topology]

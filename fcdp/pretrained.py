"""Weights from other programs: safetensors files, of which each rank reads its own shards."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fcdp.agreement import on_all_ranks
from fcdp.checkpoint.saving import background_of, why
from fcdp.engine import engine_of
from fcdp.exporting import base_state
from fcdp.extensions import opened
from fcdp.optional import safetensors


def load_pretrained(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Read a model's weights as its ``from_pretrained`` does, into shards. Collective.

    Each rank reads its own shards and nothing else, one parameter at a time, so that a node's host
    memory never holds the model twice. Parameters without memory (``meta``) get it here, on the
    device of the topology: build the model by ``accelerate.init_empty_weights``, which leaves
    buffers real. Values are cast to the parameters' dtype. Of a ``PeftModel`` the base model is
    read; adapters, which must have memory, stay as they are.

    Args:
        model: A cached model.
        directory: With ``*.safetensors``, as ``export`` and ``save_pretrained`` write them; all
            nodes see it, or each has a copy.

    Raises:
        ImportError: Without safetensors.
        ValueError: On every rank, before anything is changed: for files that lack a parameter or a
            buffer, or have another shape for it; for packed parameters; and for adapters and
            buffers without memory.
        RuntimeError: On every rank if any rank has no memory for its shards.

    Example:
        >>> fcdp.export(model, directory)
        >>> fcdp.load_pretrained(model, directory)
    """
    safetensors("fcdp.load_pretrained reads safetensors files")
    engine, where = engine_of(model), Path(directory)
    background = background_of(engine.topology)
    background.settle()
    names = on_all_ranks(f"directory = {where}", background.group, lambda: _names(model, where))
    device = engine.topology.mesh.device_type
    engine.staleness.doubt()

    def allocate() -> None:
        model._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)

    on_all_ranks(f"directory = {where}", background.group, allocate)
    state = base_state(model)
    tensors = {there: _plain(here, state[here]).detach() for there, here in names.items()}
    try:
        state_dict_loader.load(
            tensors,
            storage_reader=_Reader(os.fspath(where)),
            process_group=background.group,
        )
    except CheckpointException as failure:
        raise ValueError(f"{where}: cannot be read: {why(failure)}") from failure
    engine.staleness.loaded()


class _Reader(HuggingFaceStorageReader):
    """Opens a file anew for each part: memory that a rank has read of it is given back."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            one = LoadPlan([item], plan.storage_data, plan.planner_data)
            super().read_data(one, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _names(model: nn.Module, where: Path) -> dict[str, str]:
    """A name in the model for each tensor that is read from the files, tied ones once.

    Raises ``ValueError`` where the files and the model do not fit.
    """
    if not [*where.glob("*.safetensors")]:
        raise ValueError(f"directory = {where}: has no *.safetensors, as save_pretrained writes")
    there = HuggingFaceStorageReader(os.fspath(where)).read_metadata().state_dict_metadata
    state = base_state(model)
    called: dict[int, list[str]] = defaultdict(list)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            called[id(value)].append(name)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names: dict[str, str] = {}
    for same in called.values():
        # Tied tensors have one of their names there, files of a body alone none of its prefix.
        wanted = [*same, *(name.removeprefix(prefix) for name in same)]
        found = next((name for name in wanted if name in there), None)
        if found is None:
            raise ValueError(
                f"directory = {where}: lacks {same[0]}; must have the model's own names, as its "
                "save_pretrained writes them (load others by from_pretrained, before fcdp.shard)"
            )
        names[found] = same[0]
        _check_shape(same[0], state[same[0]], there[found])
    read = {id(state[name]) for name in names.values()}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_meta and id(value) not in read:
            raise ValueError(
                f"{name}: has no memory, and no file has its values; make adapters and buffers "
                "real before fcdp.shard (accelerate.init_empty_weights leaves buffers real)"
            )
    return names


def _check_shape(name: str, value: torch.Tensor, saved: Any) -> None:
    if _plain(name, value).shape != saved.size:
        raise ValueError(
            f"{name}: has shape {tuple(saved.size)} in the files; must be {tuple(value.shape)}, "
            "the model's"
        )


def _plain(name: str, value: torch.Tensor) -> torch.Tensor:
    """The tensor that holds a parameter's values. Raises ``ValueError`` for a packed one."""
    plain: Mapping[str, torch.Tensor] = opened(name, value)
    if [*plain] != [name]:
        raise ValueError(
            f"{name}: is packed, and no file has it so; quantise a model that from_pretrained has "
            "loaded, before fcdp.shard"
        )
    return plain[name]

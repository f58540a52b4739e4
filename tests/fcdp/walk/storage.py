"""Events that load and save: state dicts, checkpoints of PyTorch's and of FCDP's own."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.walk.drive import Walk
from tests.fcdp.walk.pair import Side


@dataclass(frozen=True)
class Checkpoint:
    """The place of a checkpoint of FCDP's copy, and what FSDP2's held then."""

    directory: Path
    params: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def _snapshot(side: Side, directory: Path) -> Checkpoint:
    params = {name: param.detach().clone() for name, param in side.params.items()}
    return Checkpoint(directory, params, copy.deepcopy(side.optimizer.state_dict()))


def load(walk: Walk) -> None:
    """A state dict of other values, whole or in part."""
    factor, whole = walk.random.choice([0.5, 1.0, 1.5]), walk.random.random() < 0.7
    walk.note(f"{factor}{'' if whole else ' in part'}")
    for side in walk.pair.sides:
        state = {name: value.clone() * factor for name, value in side.model.state_dict().items()}
        if not whole:
            state = {name: value for name, value in state.items() if "blocks.0" in name}
        side.model.load_state_dict(state, strict=whole)


def rebuild(walk: Walk) -> None:
    """A fresh pair takes over parameters and optimizer states; ``assign`` before any forward."""
    if walk.waiting or walk.uneven:
        return
    walk.tidy()
    # State dicts cloned value by value know of no ties.
    assign = walk.random.random() < 0.5 and not walk.options.tied
    walk.note("assign" if assign else "copy")
    before, after = walk.replace_pair()
    for old, new in zip(before.sides, after.sides, strict=True):
        state = {name: value.detach().clone() for name, value in old.model.state_dict().items()}
        new.model.load_state_dict(state, assign=assign)
        new.follow_parameters()
        new.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))


def keep_state(walk: Walk) -> None:
    """Take a state dict, to be written into later."""
    for side in walk.pair.sides:
        side.old_state = side.model.state_dict()


def write_old_state(walk: Walk) -> None:
    """Write into a state dict that was taken before other events."""
    if walk.pair.cached.old_state is None:
        keep_state(walk)
    walk.tidy()
    rank = walk.random.choice([None, *range(walk.options.world_size)])
    part = walk.random.choice(["blocks.0", "blocks.1", "head", ""])
    walk.note(f"{part or 'all'} on {'all' if rank is None else rank}")
    for side in walk.pair.sides:
        for name, value in (side.old_state or {}).items():
            if part in name and rank in (None, walk.rank):
                value.detach().mul_(0.75)


def save_by_dcp(walk: Walk) -> None:
    directory = walk.directory / f"dcp-{len(walk.dcp_checkpoints)}"
    cached, reference = walk.pair.sides
    state_dict_saver.save({"model": cached.model.state_dict()}, checkpoint_id=directory)
    walk.dcp_checkpoints.append(_snapshot(reference, directory))


def load_by_dcp(walk: Walk) -> None:
    """Load in place, into a state dict taken now or earlier."""
    if not walk.dcp_checkpoints:
        save_by_dcp(walk)
    walk.tidy()
    into_old = walk.random.random() < 0.5
    walk.note("into a kept state" if into_old else "")
    checkpoint = walk.random.choice(walk.dcp_checkpoints)
    for side in walk.pair.sides:
        state = side.old_state if into_old and side.old_state else side.model.state_dict()
        if side.cached:
            state_dict_loader.load({"model": state}, checkpoint_id=checkpoint.directory)
            continue
        for name, value in state.items():
            saved = checkpoint.params.get(name)
            if saved is not None:  # of tied parameters one name is enough
                value.detach().copy_(saved)


def save(walk: Walk) -> None:
    """A checkpoint by ``fcdp.save``, between steps."""
    if walk.waiting or walk.uneven:
        return
    directory = walk.directory / f"save-{len(walk.checkpoints)}"
    cached, reference = walk.pair.sides
    walk.tidy()
    fcdp.save(cached.model, cached.optimizer, directory, extra={"event": len(walk.notes)})
    walk.checkpoints.append(_snapshot(reference, directory))


def resume(walk: Walk) -> None:
    """Resume from a checkpoint, with a fresh pair or the present one."""
    if walk.waiting or walk.uneven:
        return
    if not walk.checkpoints:
        save(walk)
    checkpoint, fresh = walk.random.choice(walk.checkpoints), walk.random.random() < 0.7
    walk.note(f"{checkpoint.directory.name} {'fresh' if fresh else 'in place'}")
    if fresh:
        walk.replace_pair()
    walk.tidy()
    cached, reference = walk.pair.sides
    fcdp.load(cached.model, cached.optimizer, checkpoint.directory)
    with torch.no_grad():
        for name, param in reference.params.items():
            param.copy_(checkpoint.params[name])
    reference.optimizer.load_state_dict(copy.deepcopy(checkpoint.optimizer))


def state_dict(walk: Walk) -> None:
    """Look at the state; changes nothing."""

    def local(side: Side) -> dict[str, torch.Tensor]:
        return {
            name: value.to_local().clone()
            for name, value in side.model.state_dict().items()
            if isinstance(value, DTensor)
        }

    walk.both("state", local)

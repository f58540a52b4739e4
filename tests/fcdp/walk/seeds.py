"""Walks by number: what a seed draws, and how ranks walk it."""

import faulthandler
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.fcdp.walk import passes, storage, writes
from tests.fcdp.walk.drive import Event, Handler, Walk, WalkFailed
from tests.fcdp.walk.options import Options, draw_options
from tests.ranks import Pools, RankFailure

EVENTS = 30

#: A walk takes about a second; a rank that says nothing for so long hangs.
_TIMEOUT_S = 100

#: How often each kind is drawn; what is not named: once.
_WEIGHTS = {
    "train": 12,
    "backward": 4,
    "step": 4,
    "micro": 5,
    "last": 3,
    "accumulate": 4,
    "evaluate": 4,
    "no_grad_forward": 2,
    "freeze": 3,
    "thaw": 3,
    "load": 2,
    "write": 4,
    "data_write": 4,
    "zero_grad": 2,
    "average": 2,
    "boom": 2,
}

#: Kinds that need what torch has since 2.13: a model goes on after an exception amid a pass.
_NEED_RESET = {"boom", "boom_in_backward", "write_within", "data_write_within"}

#: Kinds that write where contents alone show it, or may.
_UNSEEN = {
    "data_write",
    "foreach_write",
    "assign_data",
    "vector_write",
    "master_copy",
    "average",
    "closure",
    "write_within",
    "data_write_within",
}
_ACCELERATOR_SHAPES = [(2, 2), (3, 2), (2, 1)]

#: Events by kind: the public functions of the modules that have them, and variants of one.
HANDLERS: dict[str, Handler] = {
    **{
        name: function
        for module in (passes, writes, storage)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    },
    "backward": lambda walk: walk.backward("plain"),
    "micro": lambda walk: walk.backward("waits"),
    "last": lambda walk: walk.backward("last"),
    "step": Walk.step,
    "freeze": lambda walk: passes._set_trained(walk, False),
    "thaw": lambda walk: passes._set_trained(walk, True),
    "write": lambda walk: writes._write_between(walk, writes._VISIBLE),
    "data_write": lambda walk: writes._write_between(walk, writes._UNSEEN),
    "write_within": lambda walk: writes._write_within(walk, writes._VISIBLE),
    "data_write_within": lambda walk: writes._write_within(walk, writes._UNSEEN),
}

#: An event that takes longer is a hang, and its stack is dumped.
_HANG_S = 60


def walk_on_rank(options: Options, events: Sequence[Event], directory: Path) -> list[str]:
    """Walk through all events; return what was done. Raises ``WalkFailed`` with the place.

    Says in a file of ``directory`` where it is, and there dumps its stack if it hangs.
    """
    with open(place_of(directory, dist.get_rank()), "w") as place:
        walk = Walk(options, directory)
        for index, event in enumerate(events):
            place.seek(place.truncate(0))
            print(f"event {index}, {event}", file=place, flush=True)
            faulthandler.dump_traceback_later(_HANG_S, file=place)
            try:
                problem = walk.go(event, HANDLERS[event.kind])
            except Exception as error:
                raise WalkFailed(f"event {index}, {walk.notes[-1]}: {error!r}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
            if problem is not None:
                raise WalkFailed(f"event {index}, {walk.notes[-1]}: {problem}")
        return walk.notes


def place_of(directory: Path, rank: int) -> Path:
    return directory / f"place.{rank}"


@dataclass(frozen=True)
class Case:
    """One walk, whole: nothing else is drawn."""

    seed: int
    options: Options
    events: tuple[Event, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.options}"]
        lines += [f"  {index:2} {event}" for index, event in enumerate(self.events)]
        return "\n".join(lines)


def kinds_here() -> set[str]:
    """The kinds of event that this torch can go on after."""
    return HANDLERS.keys() - (set() if hasattr(FSDPModule, "reset_iter_state") else _NEED_RESET)


def draw(seed: int, kinds: Collection[str] = HANDLERS) -> Case:
    """The walk of a seed, of some kinds of event only if asked to."""
    random = Random(f"events {seed}")
    usable = sorted(set(kinds) & kinds_here())
    weights = [_WEIGHTS.get(kind, 1) for kind in usable]
    events = tuple(
        Event(kind, random.randrange(10**6)) for kind in random.choices(usable, weights, k=EVENTS)
    )
    return Case(seed, draw_options(seed), events)


def draw_on_an_accelerator(seed: int) -> Case:
    """The walk of a seed, of what hooks and stamps see: nothing compares contents there."""
    case = draw(seed, HANDLERS.keys() - _UNSEEN)
    nodes, ranks_per_node = _ACCELERATOR_SHAPES[seed % len(_ACCELERATOR_SHAPES)]
    options = replace(
        case.options,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        detect_writes=False,
        coding=None,  # the coder is the CPU's
    )
    return replace(case, options=options)


def run(ranks: Pools, case: Case, directory: Path) -> str | None:
    directory.mkdir(parents=True, exist_ok=True)
    world_size = case.options.world_size
    try:
        ranks.run(
            world_size, walk_on_rank, case.options, case.events, directory, timeout_s=_TIMEOUT_S
        )
    except RankFailure as failure:
        places = [
            f"rank {rank} was last at {place_of(directory, rank).read_text().strip()}"
            for rank in range(world_size)
            if place_of(directory, rank).is_file()
        ]
        return "\n".join([str(case), *places, str(failure)])
    return None

"""A walk as one rank runs it."""

from __future__ import annotations

import faulthandler
import inspect
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests.fcdp.walk import passes, storage, writes
from tests.fcdp.walk.drive import Event, Handler, Walk, WalkFailed
from tests.fcdp.walk.options import Options

#: Events by kind: the public functions of the modules that have them.
HANDLERS: dict[str, Handler] = {
    name: function
    for module in (passes, writes, storage)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
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

"""A user's own objective, checked to call the model alike on all ranks.

Each call is a collective, so that ranks which call it unequally wait for each other: one in a call,
others at the end of a phase. A rank that has waited there for seconds says so in the process
group's store, and one that has called the model more often raises an error in place of its wait.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from experiments.records.cell import Cell
from experiments.records.objective import OwnObjective
from experiments.worker import models
from experiments.worker.objectives.objective import Ended, Objective, Phase
from fcdp.failure import Announcement, Board, break_all, every_backend

#: Attributes that it must have.
_PARTS = ("epochs", "rewards", "prepare", "loss")
#: The count of each rank.
_CALLS = "calls of the model"
#: Seconds between two looks at who waits; a wait that takes two of them is a long one.
LOOK_S = 5.0


class Own:
    """The user's objective; raises ``ValueError`` where calls of the model are not alike."""

    def __init__(self, spec: OwnObjective, cell: Cell) -> None:
        """Raises ``ValueError`` where the user's function makes no objective."""
        where = cell.origin.key("objective", "function")
        self._where = f"{where}: {spec.function}"
        made: Any = models.find_function(spec.function, where)(cell.sequence_length)
        if lacking := [name for name in _PARTS if not hasattr(made, name)]:
            raise ValueError(
                f"{self._where} returned a {type(made).__name__} without {', '.join(lacking)}; "
                "it must return an Objective of experiments.worker.objectives"
            )
        self._made: Objective = made
        self._iteration = 0
        #: Ends of phases and calls of this iteration so far, and the end at which this rank waits.
        self._state: tuple[int, int, str] = (0, 0, "")
        #: The error's text, once the thread has found one.
        self._wrong = ""

    @property
    def epochs(self) -> int:
        return self._made.epochs

    @property
    def rewards(self) -> Sequence[float]:
        return self._made.rewards

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """The user's micro-batches, once all ranks have prepared equally many."""

        def phase_ended(phase: Phase) -> None:
            with self._waiting(f"the end of {phase}"):
                ended(phase)

        self._iteration, self._state = self._iteration + 1, (0, 0, "")
        with self._counted(model), self._watched():
            prepared = self._made.prepare(model, batches, phase_ended)
            with self._waiting("the end of prepare"):
                by_rank: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(by_rank, (self._state[1], len(prepared), self.epochs))
        if len({*by_rank}) > 1:
            raise ValueError(
                f"{self._where}: calls of the model, micro-batches and epochs, by rank = {by_rank}"
                "; must be alike"
            )
        return prepared

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self._state = 0, 0, ""
        with self._counted(model, most=1):
            loss = self._made.loss(model, batch)
        if not self._state[1]:
            raise ValueError(f"{self._where}: loss has not called the model; it must, once")
        return loss

    @contextmanager
    def _counted(self, model: nn.Module, most: float = math.inf) -> Iterator[None]:
        """Count calls before they exchange anything, and allow ``most``."""

        def count(*_: object) -> None:
            ends, calls, _at = self._state
            if calls == most:
                raise ValueError(f"{self._where}: loss calls the model again; it must, once")
            self._state = ends, calls + 1, ""

        hook = model.register_forward_pre_hook(count, prepend=True)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def _waiting(self, at: str) -> Iterator[None]:
        ends, calls, _ = self._state
        self._state = ends, calls, at
        yield
        self._state = ends + 1, calls, ""

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watch the wait from a thread, which ends it if another rank can no longer come."""
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over.wait,), daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            if self._wrong:
                raise ValueError(self._wrong) from error
            raise
        finally:
            over.set()
            thread.join()

    def _look(self, over: Callable[[float], bool]) -> None:
        rank = dist.get_rank()
        board: Board | None = None
        seen: tuple[int, int, str] | None = None
        with suppress(RuntimeError):  # a lost store: the waiting call says why
            while not over(LOOK_S):
                board = board or Board("objective")
                ends, calls, at = state = self._state
                key = f"{self._iteration}/{ends}"
                if at and state == seen:
                    board.put(key, Announcement(f"another waits at {at}", {_CALLS: calls}))
                posted = board.read(key)
                if posted and (calls > posted.exchanges[_CALLS] or not posted.text.endswith(at)):
                    self._wrong = (
                        f"{self._where}: rank {rank} has called the model {calls} times and is "
                        f"{f'at {at}' if at else 'in a call'}, {posted.text} after "
                        f"{posted.exchanges[_CALLS]}; must be alike"
                    )
                    break_all(every_backend())
                    return
                seen = state

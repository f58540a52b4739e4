"""One walk on one rank: its state, what an event may do, and the verdict after each event."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.fcdp.walk.model import batch
from tests.fcdp.walk.options import Options
from tests.fcdp.walk.pair import Micro, Pair, Side, differ, group_of

T = TypeVar("T")

#: How long a rank waits for the others after an event.
_AGREEMENT = timedelta(seconds=20)

#: What a refusal speaks of: other errors are none.
_CLEAR = re.compile(r"fcdp\.|micro-batch|written|writes?\b|wait to be reduced")


@dataclass(frozen=True)
class Event:
    """One thing that users do; what is left open about it is drawn from its own seed."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}"


class WalkFailed(AssertionError):
    """An event after which the copies differ, or that ended in an error it does not expect."""


class Walk:
    """The state that events act on. Draws and decisions are alike on all ranks."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.pair = Pair(options, directory, seed=1)
        self.pairs_made = 1
        self.group = group_of(dist.group.WORLD)
        self.rank = self.pair.topology.rank
        self.random = Random()
        #: The model's own forward has run, with all blocks: FSDP2 allows no other before, and none
        #: in inference mode.
        self.started = False
        #: Sums of micro-batches wait, and in what else the next backward may be refused for it.
        self.waiting = False
        self.uneven = ""
        self.skip: frozenset[int] = frozenset()
        #: By ``fcdp.save``, and by PyTorch's own.
        self.checkpoints: list[Any] = []
        self.dcp_checkpoints: list[Any] = []
        self.notes: list[str] = []
        self._problems: list[str] = []

    # What events use

    def note(self, text: str) -> None:
        """Note a draw, for the report of a failure."""
        self.notes[-1] += f" {text}"

    def tokens(self) -> torch.Tensor:
        return batch(self.random.randrange(2**24), self.rank)

    def expect_equal(self, what: str, value: Any, expected: Any) -> None:
        """Note a difference. The event goes on: other ranks do not know of it yet."""
        if difference := differ(what, value, expected):
            self._problems.append(difference)

    def both(self, what: str, action: Callable[[Side], T]) -> T:
        """Run ``action`` on FCDP's copy, then on FSDP2's; results must be equal."""
        value, expected = (action(side) for side in self.pair.sides)
        self.expect_equal(what, value, expected)
        return expected

    def may_refuse(self, why: str, what: str, action: Callable[[Side], Any]) -> bool:
        """Do as ``both``, where FCDP may refuse on all ranks; then both begin the step anew.

        Returns whether it did.
        """
        value, refused = self.attempt(lambda: action(self.pair.cached))
        if refused:
            self.note(f"(refused: {why})")
            self.begin_anew()
            return True
        self.expect_equal(what, value, action(self.pair.reference))
        return False

    def attempt(self, action: Callable[[], T]) -> tuple[T | None, bool]:
        """Return the result of ``action``, or its refusal, clear and on all ranks or none."""
        value, error = None, None
        try:
            value = action()
        except RuntimeError as caught:
            error = caught
        refused = self._agree(error is not None)
        if not any(refused):
            return value, False
        if error is not None and not _CLEAR.search(str(error)):
            raise error
        if not all(refused):
            ranks = [rank for rank, did in enumerate(refused) if did]
            raise WalkFailed(f"refused on ranks {ranks} alone: {error}")
        self.note(f"<{error}>")
        return None, True

    def tidy(self) -> None:
        """Prepare for a write: see ``Side.let_go``."""
        for side in self.pair.sides:
            side.let_go()

    def start(self) -> None:
        """Run the model's own forward first, if it has not been run yet."""
        if not self.started:
            tokens = self.tokens()
            with torch.no_grad():
                self.both("first forward", lambda side: side.model(tokens[:, :-1]))
            self.started = True

    def backward(self, micro: Micro) -> None:
        """A forward and backward; whatever makes micro-batches uneven may be refused."""
        if not self.waiting or self.random.random() < 0.05:
            skip = self._draw_skip()
            if self.waiting and skip != self.skip:
                self.uneven = "other blocks than in earlier micro-batches"
            self.skip = skip
        tokens, scale, skip = self.tokens(), self.random.choice([0.5, 1.0, 2.0]), self.skip
        self.note(f"{micro}{' without ' + str(sorted(skip)) if skip else ''}")

        def action(side: Side) -> torch.Tensor:
            return side.backward(tokens, skip, micro, scale)

        self.started = self.started or not skip
        if self.uneven:
            if self.may_refuse(self.uneven, "loss", action):
                return
        else:
            self.both("loss", action)
        self.waiting = micro == "waits"

    def step(self) -> None:
        """An optimizer step; refused where sums wait."""
        self.tidy()
        if self.waiting or self.uneven:
            why = self.uneven or "sums wait"
            if self.may_refuse(why, "step", lambda side: side.optimizer.step()):
                return
            self.waiting, self.uneven = False, ""
        else:
            self.both("step", lambda side: side.optimizer.step())
        self.zero_grad()

    def zero_grad(self) -> None:
        set_to_none = self.options.set_to_none
        self.both("zero_grad", lambda side: side.optimizer.zero_grad(set_to_none=set_to_none))

    def begin_anew(self) -> None:
        """Drop what a refused pass has left, on both sides."""
        for side in self.pair.sides:
            side.recover()
        self.waiting, self.uneven = False, ""

    def replace_pair(self) -> tuple[Pair, Pair]:
        """A fresh pair with other parameters takes the place of the present one; old and new."""
        before = self.pair
        self.pairs_made += 1
        self.pair = Pair(self.options, self.directory, seed=self.pairs_made)
        self.started, self.waiting, self.uneven = False, False, ""
        for old, new in zip(before.sides, self.pair.sides, strict=True):
            new.average = old.average
            for name, param in new.params.items():
                param.requires_grad_(old.params[name].requires_grad)
        return before, self.pair

    def _draw_skip(self) -> frozenset[int]:
        if self.random.random() < 0.75:
            return frozenset()
        return frozenset({self.random.randrange(self.options.blocks)})

    # What drives them

    def go(self, event: Event, handler: Callable[[Walk], None]) -> str | None:
        """Run the event; return what is wrong afterwards on this rank, if anything.

        What an event raises ends the walk at once: others may wait for this rank elsewhere.
        """
        self.random = Random(event.seed)
        self.notes.append(str(event))
        self._problems.clear()
        handler(self)
        difference = self.pair.difference(gradients=not (self.waiting or self.uneven))
        problem = "; ".join([*self._problems, *([difference] if difference else [])]) or None
        if problem is None and any(self._agree(False)):
            return "another rank differs"
        if problem is not None:
            self._agree(True)
        return problem

    def _agree(self, answer: bool) -> list[bool]:
        """Gather every rank's answer."""
        mine = torch.tensor([answer], device="cpu")
        answers = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(answers, mine, group=self.group, async_op=True)
        work.wait(_AGREEMENT)
        return [bool(answer) for answer in answers]


#: What a kind of event does.
Handler = Callable[[Walk], None]

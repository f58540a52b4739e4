"""Failures of single ranks: told to the others, who then stop waiting for what cannot come.

A rank that raises between exchanges leaves the others in an exchange that it never joins. It
announces its error in the process group's store. A thread on each rank looks there once the main
thread has waited for longer than a second, and breaks the process groups under a wait that cannot
end: the main thread raises :class:`RankFailed`, which names the rank that failed first.

What cannot end is decided by counts that are alike on all ranks: the pass (one forward of the root
model and all that follows until the next) and the exchanges in it. Whoever has entered more of them
than the failed rank completed waits in vain. Where all ranks raise alike, as out of memory, none
has; all of them may catch the error and go on.

On CUDA the main thread seldom waits for an exchange: the device does. The thread therefore looks
every few seconds and aborts the groups, the device runs on with whatever its buffers hold, and
``RankFailed`` is raised by the next exchange that the host issues. A loss read in between is
meaningless; parameters stepped in between can only be thrown away.

Not covered: exchanges outside of ``waiting`` (a user's own), until the failed process ends and
closes its connections; and a machine that vanishes and closes none: the group's time-out ends
those, as without this module.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from fcdp.board import Announcement, Board, served_here
from fcdp.breaking import backends_of, break_all, is_gloo
from fcdp.watcher import watch

#: Ranks per further second between looks. 512 ranks that all wait ask the store a thousand
#: questions per second; it answers fifty thousand.
RANKS_PER_POLL = 256
#: A rank that does not wait looks less often by this factor, and only on an accelerator.
IDLE_POLLS = 5
#: Looks at a store that does not answer, before it counts as lost.
PATIENCE = 3
#: Seconds for which the process that serves the store outlives its own error.
LINGER_S = 10.0
#: Seconds between two questions of a rank that has nothing else to do.
PAUSE_S = 0.1
#: Seconds that a rank which failed in one pass allows the others until the next.
ROLL_CALL_S = 600.0
#: Characters of an error: it crosses the network and is shown on every rank.
TEXT_LIMIT = 300

_FINAL = "final"
_ROLL_CALL = "roll call"
_LOST = "the process group's store does not answer; rank 0 was lost?"


class RankFailed(RuntimeError):
    """An exchange cannot end, or ended in an error, because another rank failed."""


class Failures:
    """What the ranks of ``groups`` know of each other's failures. Making one is not collective.

    ``groups`` are all that ``waiting`` exchanges over; the widest has all the ranks. ``name`` is
    alike on these ranks and used by no others.
    """

    def __init__(self, name: str, groups: Sequence[dist.ProcessGroup]) -> None:
        self._ranks = max(group.size() for group in groups)
        self._backends = [backend for group in groups for backend in backends_of(group)]
        #: Whether there is nobody to tell.
        self._alone = self._ranks == 1
        self._on_accelerator = not all(map(is_gloo, self._backends))
        self._board = Board(name)
        #: Why nothing can be exchanged any more.
        self._over: str | None = None
        self._pass = 0
        #: Exchanges of this pass that this rank has entered, and of the pass before, which a
        #: device may still be at.
        self._exchanges = self._before = 0
        #: Held while a pass becomes the one before: the thread looks at both.
        self._moving = threading.Lock()
        #: Exchanges that this rank had entered when this pass failed here, if it did.
        self._failed_at: int | None = None
        #: Whether the pass before failed here.
        self._forgiven = False
        self._in_backward = False
        #: How many ``waiting`` and ``completing`` the main thread is in, one in another.
        self._depth = 0
        self._completing = False
        #: What the caller of the forward was handling, by its id: it would keep tensors alive.
        self._handled = id(None)
        self._seen = (0, 0)
        self._looks = self._unanswered = 0
        self._answered = -1

    def begins(self) -> None:
        """Count a pass: the root model's forward begins. Alike on all ranks.

        After a failure of this rank, it begins once all ranks have left the one that failed.
        """
        if self._over is not None:
            raise RankFailed(self._over)
        self._notice_dead_backward()
        failed = self._failed_at is not None
        if failed:
            self._call_roll()
        with self._moving:
            self._before = 0 if failed else self._exchanges
            self._forgiven = failed
            self._exchanges, self._failed_at = 0, None
            self._pass += 1
        self._handled = id(sys.exc_info()[1])
        if self._pass == 1 and not self._alone:
            self._begin_to_look()

    def backward_runs(self) -> None:
        """Note that a backward is under way. Call it inside, as often as is convenient.

        PyTorch has no hook for a backward that raises: the next exchange announces it, or the next
        pass.
        """
        if not self._in_backward and _backward_is_here():
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False

    def _notice_dead_backward(self) -> None:
        if self._in_backward and not _backward_is_here():
            self._in_backward = False
            self.announce(RuntimeError("a backward did not end; it raised an error of its own"))

    @property
    def place(self) -> int | None:
        """16 bits that tell which exchange of which pass comes next; alike on all ranks.

        ``None`` after a pass that failed here: all have left it, each where it was.
        """
        if self._forgiven:
            return None
        return zlib.crc32(f"{self._pass} {self._before} {self._exchanges}".encode()) & 0xFFFF

    def raise_out_of_step(self) -> NoReturn:
        """End what all ranks do together: some have left out exchanges that others were in."""
        reason = (
            "ranks are not at the same exchange: one has left some out, as by an error that it "
            "alone raised and caught; go on from the last checkpoint"
        )
        with contextlib.suppress(Exception):
            reason = self._give_up(reason)
        self._end(reason)
        raise RankFailed(reason)

    def forward_ends(self) -> None:
        """Announce the error that ends the forward, if one does: for an ``always_call`` hook.

        PyTorch runs such hooks while it handles the forward's error. One that was being handled
        when the forward began is not the forward's.
        """
        error = sys.exc_info()[1]
        if error is not None and id(error) != self._handled:
            self.announce(error)

    def announce(self, error: BaseException, *, final: bool = False) -> None:
        """Tell the other ranks that this one failed in this pass; never raises.

        ``final``: it will not come back, and whoever waits for it waits in vain.
        """
        if self._alone:
            return
        if self._failed_at is None:
            self._failed_at = self._exchanges
        with contextlib.suppress(Exception):  # the error that is announced is what matters
            text = str(error)
            if not isinstance(error, RankFailed):
                text = f"rank {dist.get_rank()} failed: {_brief(error)}"
            if final:
                self._give_up(text)
            else:
                self._board.put(str(self._pass), Announcement(text, self._exchanges))

    def waiting(self) -> Failures:
        """Wrap what issues exchanges or waits for them: ``with failures.waiting(): ...``.

        Entered equally often on all ranks. A transport's error within is raised as
        :class:`RankFailed`.
        """
        return self

    def __enter__(self) -> None:
        if self._over is not None or self._in_backward:
            self._check()
        self._exchanges += 1
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if error is not None:
            self._exchanges -= 1  # entered, not completed
            self._explain(error)

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Wrap a wait for exchanges that were issued under ``waiting``, and counted there.

        Ranks may enter it at different times, or in a pass that has failed here.
        """
        self._check()
        self._depth, self._completing = self._depth + 1, True
        try:
            yield
        except BaseException as error:
            self._explain(error)
            raise
        finally:
            self._depth, self._completing = self._depth - 1, False

    def _check(self) -> None:
        if self._over is not None:
            raise RankFailed(self._over)
        self._notice_dead_backward()

    def look(self) -> None:
        """Break the groups if their exchanges cannot end. The thread calls it every second."""
        self._looks += 1
        stride = 1 + self._ranks // RANKS_PER_POLL
        if self._looks % stride or self._over is not None:
            return
        now = (self._pass, self._exchanges)
        stuck = self._depth > 0 and now == self._seen
        self._seen = now
        if stuck or (self._on_accelerator and not self._looks % (stride * IDLE_POLLS)):
            reason = self._hopeless(stuck)
            if reason is not None:
                with contextlib.suppress(Exception):
                    reason = self._give_up(reason)
                self._end(reason)
        else:
            self._unanswered = 0

    def linger(self) -> None:
        """Keep the store up until the others have read why this process ends."""
        until = time.monotonic() + LINGER_S
        with contextlib.suppress(Exception):
            while served_here() and self._board.signed(_FINAL) < self._ranks:
                if time.monotonic() > until:
                    return
                time.sleep(PAUSE_S)

    def _begin_to_look(self) -> None:
        try:
            self._board.open()
        except Exception:  # the store of a fake process group
            self._alone = True
        else:
            watch(self)

    def _call_roll(self) -> None:
        """Wait until no rank is in the pass in which this one failed.

        Were any, this rank's next exchange would be taken for the one that it left out.
        """
        key = str(self._pass)
        until = time.monotonic() + ROLL_CALL_S
        try:
            self._answered = self._pass
            self._board.write(_ROLL_CALL, self._pass)
            self._board.sign(key)
            while self._board.signed(key) < self._ranks and self._over is None:
                if final := self._board.read(_FINAL):
                    self._end(self._give_up(final.text))
                elif time.monotonic() > until:
                    self._end(self._give_up(f"some ranks did not leave pass {key}, which failed"))
                time.sleep(PAUSE_S)
        except Exception as error:
            self._end(f"{_LOST} {_brief(error)}")
        if self._over is not None:
            raise RankFailed(self._over)

    def _answer_roll(self) -> None:
        called = self._board.number(_ROLL_CALL)
        if called is not None and self._answered < called < self._pass:
            self._answered = called
            self._board.sign(str(called))

    def _hopeless(self, stuck: bool) -> str | None:
        """Why this rank's exchanges cannot end, if so."""
        try:
            reason = self._others_failure()
            self._answer_roll()
        except Exception as error:
            # A rank that does not wait may as well see the store closed at the end of training.
            self._unanswered += stuck
            return f"{_LOST} {_brief(error)}" if self._unanswered >= PATIENCE else None
        self._unanswered = 0
        return reason

    def _others_failure(self) -> str | None:
        if final := self._board.read(_FINAL):
            return final.text
        with self._moving:
            reached = self._exchanges
            if self._failed_at is not None:
                # What it left in flight may wait for a rank that failed before it got there.
                reached = self._failed_at if self._completing else 0
            passes = ((self._pass, reached), (self._pass - 1, self._before))
        for number, exchanges in passes:
            announced = self._board.read(str(number)) if exchanges else None
            if announced is not None and announced.exchanges < exchanges:
                return announced.text
        return None

    def _explain(self, error: BaseException) -> None:
        """Raise the reason for a transport's error; return if it is none."""
        others = RankFailed | torch.OutOfMemoryError
        if not isinstance(error, RuntimeError) or isinstance(error, others):
            return
        if self._over is None:
            reason = (
                f"rank {dist.get_rank()} could not exchange with another rank, and no rank has "
                "reported an error: one was killed (by its host for lack of memory?), was cut "
                f"off, or took longer than the group's time-out; {_brief(error)}"
            )
            try:
                known = self._board.read(_FINAL) or self._board.read(str(self._pass))
                reason = self._give_up(known.text if known else reason)
            except Exception:
                reason += f"; {_LOST}"
            self._end(reason)  # for whoever waits for this rank
        raise RankFailed(self._over) from error

    def _give_up(self, reason: str) -> str:
        """Tell the others that this rank exchanges no more; returns the first such reason."""
        reason = self._board.put(_FINAL, Announcement(reason, 0))
        self._board.sign(_FINAL)
        return reason

    def _end(self, reason: str) -> None:
        self._over = reason  # before the main thread sees what breaking does
        break_all(self._backends)


def _backward_is_here() -> bool:
    """Whether this thread is in the midst of a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _brief(error: BaseException) -> str:
    """Type and text of an error, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"

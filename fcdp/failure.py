"""Failures of single ranks, announced to the others, which then stop waiting for them.

A rank that raises between exchanges leaves the others in an exchange that it never joins. It
announces its error in the process group's store. A thread on each rank looks there once the main
thread has waited for longer than a second, and breaks the process groups under a wait that cannot
end: the main thread raises :class:`RankFailed`, which names the rank that failed first.

What cannot end is decided by counts that are alike on all ranks that share them: the exchanges so
far of all ranks, and apart those of each part of them that has some of its own, as experts have
(:class:`Exchanges`). Whoever has entered more of one kind than the failed rank completed waits in
vain. Where all ranks raise at the same exchange, as out of memory, none has; all of them may catch
the error and go on. One that catches an error of its own alone ends the job with its next pass.

On CUDA the main thread seldom waits for an exchange: the device does. The thread therefore looks
every few seconds and aborts the groups, the device runs on with whatever its buffers hold, and
``RankFailed`` is raised by the next exchange that the host issues. A loss read in between is
meaningless; parameters stepped in between can only be thrown away.

The thread looks as often where the CPU may wait for what FSDP2 itself exchanges, as over replicas:
that wait then ends in the transport's error, and the next exchange raises ``RankFailed``. FSDP2's
own exchanges are not counted: a wait for the failed rank itself in one ends with its process.

Not covered: a user's own exchanges, until the failed process ends and closes its connections; and a
machine that vanishes and closes none: the group's time-out ends those, as without this module.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _world

from fcdp.counts import in_backward

#: Seconds between two looks of the thread; a wait that takes two of them is a long one.
POLL_S = 1.0
#: A rank that is not seen to wait looks less often by this factor, and not on the CPU unless it may
#: wait for FSDP2's own exchanges.
IDLE_POLLS = 5
#: Looks at a store that does not answer, before it counts as lost.
PATIENCE = 3
#: Seconds that a process waits after its own error: it serves the store, or aborts.
LINGER_S = 10.0
#: Seconds between two polls of the store by a rank that only waits.
PAUSE_S = 0.1
#: Seconds that a rank whose pass failed waits, at the next, for the others to leave it.
ROLL_CALL_S = 600.0
#: Characters of an error: it crosses the network and is shown on every rank.
TEXT_LIMIT = 300

_FINAL = "final"
_LOST = "the process group's store does not answer; rank 0 was lost?"
_OUT_OF_STEP = (
    "{who} are not at the same exchange: one has left some out, as by an error that it alone "
    "raised and caught, or by modules that it alone did not call; go on from the last checkpoint"
)
_STORE_TIMEOUT = timedelta(seconds=20)
#: Exchanges use no tags so large. Consecutive ones go by the interfaces in turn.
_UNUSED_TAG = 1 << 20


class RankFailed(RuntimeError):
    """An exchange cannot end, or ended in an error, because another rank failed."""


class Announcement(NamedTuple):
    """The failure of one rank, as the others read it."""

    text: str
    #: Exchanges that the failed rank completed, by :attr:`Exchanges.name`, the fewest of several
    #: failed ones; −1 where it will never take part in one again.
    exchanges: Mapping[str, int]


class Board:
    """Announcements of a set of ranks, in the process group's store; raises where that is lost."""

    def __init__(self, name: str) -> None:
        # A connection of its own: another thread may block for minutes on the first one. It is made
        # now: a lost store is called for minutes.
        store: Any = _get_default_store()
        store = store.clone()
        store.set_timeout(_STORE_TIMEOUT)
        self._store: Any = PrefixStore(f"fcdp/failures/{name}", store)

    def put(self, key: str, announced: Announcement) -> str:
        """Keep the first text and the fewest exchanges under ``key``; returns that text."""
        value = self._store.compare_set(key, "", json.dumps(announced))
        while True:
            there = Announcement(*json.loads(value))
            fewest = {**announced.exchanges, **there.exchanges}
            for name, completed in announced.exchanges.items():
                fewest[name] = min(completed, fewest[name])
            if fewest == there.exchanges:
                return there.text
            lower = json.dumps(there._replace(exchanges=fewest))
            value = self._store.compare_set(key, value.decode(), lower)

    def read(self, key: str) -> Announcement | None:
        """Announcement under ``key``; never waits for it."""
        if not self._store.check([key]):
            return None
        return Announcement(*json.loads(self._store.get(key)))

    def signed(self, key: str, more: int = 0) -> int:
        """Number of ranks that have signed ``key``; this one does with ``more=1``, once."""
        return int(self._store.add(f"{key}/signed", more))


class Exchanges:
    """Exchanges that some ranks have among themselves, and that each of them enters.

    Wraps what issues exchanges or waits for them: ``with topology.exchanges: ...``, equally often
    on these ranks. A transport's error within is raised as :class:`RankFailed`.
    """

    def __init__(self, failures: Failures, name: str, ranks: int) -> None:
        """``name`` is alike on these ``ranks``, and no others of ``failures`` have it."""
        self.name = name
        self.ranks = ranks
        #: Exchanges that this rank has entered, but for those after a failure in the same pass.
        self.entered = 0
        self._failures = failures

    @property
    def place(self) -> int:
        """16 bits that identify the next exchange and the failures so far; alike on these ranks."""
        return zlib.crc32(f"{self._failures._failed} {self.entered}".encode()) & 0xFFFF

    def __enter__(self) -> None:
        failures = self._failures
        if failures._over is not None or failures._in_backward:
            failures._check()
        if not failures._failing:
            self.entered += 1
        failures._depth += 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failures = self._failures
        failures._depth -= 1
        if error is not None:
            if not failures._failing:
                self.entered -= 1  # entered, not completed
            failures._explain(error)


class Failures:
    """Failures that the ranks of ``groups`` know of each other. Making one is not collective.

    ``groups`` are all that ``exchanges`` go over; the widest has all the ranks. ``name`` is alike
    on these ranks and used by no others.
    """

    def __init__(self, name: str, groups: Sequence[dist.ProcessGroup]) -> None:
        self._ranks = max(group.size() for group in groups)
        self._backends = [backend for group in groups for backend in backends_of(group)]
        #: Whether a rank may wait elsewhere than in what is counted.
        self._waits_unseen = not all(map(_is_gloo, self._backends))
        #: ``None``: there is no other rank, or no store, as where the process group is a fake.
        self._board: Board | None = None
        #: Why nothing can be exchanged any more.
        self._over: str | None = None
        #: Exchanges that all ranks enter.
        self.exchanges = Exchanges(self, "", self._ranks)
        #: These, and those of each part of the ranks that this one is in.
        self._counted = [self.exchanges]
        #: Passes that have failed here before; each has announcements of its own.
        self._failed = 0
        #: Whether the pass under way has failed here.
        self._failing = False
        #: Whether this rank runs something that it tells the others of itself.
        self._alone = False
        self._in_backward = False
        #: How many exchanges and ``completing`` the main thread is in, one in another.
        self._depth = 0
        #: Error that the forward's caller was handling, by its id: it would keep tensors alive.
        self._handled = id(None)
        self._seen: Mapping[str, int] = {}
        self._looks = self._unanswered = 0
        if self._ranks > 1:
            with contextlib.suppress(Exception):  # the store of a fake process group
                self._board = Board(name)
                watch(self)

    def cover(self, groups: Sequence[dist.ProcessGroup], *, seen: bool = True) -> None:
        """Break more groups, which have some of the ranks, where their exchanges cannot end.

        ``seen``: exchanges over them are counted (:class:`Exchanges`); those over groups of
        FSDP2's, such as over replicas, are not.
        """
        known = {*map(id, self._backends)}
        every = (backend for group in groups for backend in backends_of(group))
        more = [backend for backend in every if id(backend) not in known]
        self._backends += more
        self._waits_unseen |= bool(more) and not seen

    def part(self, name: str, ranks: int) -> Exchanges:
        """Count apart what a part of the ranks exchange; the others may do so more often or less.

        ``name`` is alike on these ``ranks``, and other parts have others.
        """
        part = Exchanges(self, name, ranks)
        self._counted.append(part)
        return part

    def _reached(self) -> dict[str, int]:
        """Exchanges that this rank has entered, by their names."""
        return {each.name: each.entered for each in self._counted}

    def begins(self) -> bool:
        """Begin a pass: the root model's forward does, or what is called in its stead.

        After a failure of this rank, it begins once all ranks have left the one that failed;
        returns whether there was one, alike on every rank.
        """
        self._check()
        if failed := self._failing:
            self._call_roll()
        self._handled = id(sys.exc_info()[1])
        return failed

    def backward_runs(self) -> None:
        """Note that a backward is under way. Call it inside, as often as is convenient.

        PyTorch has no hook for a backward that raises: the next exchange announces it, or the next
        pass.
        """
        if not self._in_backward and in_backward():
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False

    def raise_out_of_step(self, who: str = "ranks") -> NoReturn:
        """End what all ranks do together: some have left out exchanges that others were in.

        ``who`` are the ranks of which one has, in the words of the error. Call it on every rank.
        """
        raise RankFailed(self._end(_OUT_OF_STEP.format(who=who)))

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
        if self._board is None or self._alone:
            return
        self._failing = True
        with contextlib.suppress(Exception):  # the error that is announced is what matters
            text = str(error)
            if not isinstance(error, RankFailed):
                text = f"rank {dist.get_rank()} failed: {_brief(error)}"
            if final:
                self._give_up(text)
            else:
                self._board.put(str(self._failed), Announcement(text, self._reached()))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Announce no error of the body: no other rank runs it, and they learn of it otherwise."""
        before, self._alone = self._reached(), True
        try:
            yield
        finally:
            self._alone = False
            for each in self._counted:
                each.entered = before[each.name]

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Wrap a wait for exchanges that were counted when they were issued.

        Ranks may enter it at different times, or in a pass that has failed here.
        """
        self._check()
        self._depth += 1
        try:
            yield
        except BaseException as error:
            self._explain(error)
            raise
        finally:
            self._depth -= 1

    def _check(self) -> None:
        if self._over is not None:
            raise RankFailed(self._over)
        if self._in_backward and not in_backward():
            self._in_backward = False
            self.announce(RuntimeError("a backward did not end; it raised an error of its own"))

    def look(self) -> None:
        """Break the groups if their exchanges cannot end. The thread calls it every second."""
        if self._board is None or self._over is not None:
            return
        # Before the number of failures is read, as a pass after one counts that first.
        reached = self._reached()
        stuck = self._depth > 0 and reached == self._seen
        self._seen = reached
        self._looks += 1
        if not stuck:
            self._unanswered = 0
            if not self._waits_unseen or self._looks % IDLE_POLLS:
                return
        try:
            announced = self._board.read(_FINAL) or self._board.read(str(self._failed))
        except Exception as error:
            # A rank that does not wait may as well see the store closed at the end of training.
            self._unanswered += stuck
            if self._unanswered >= PATIENCE:
                self._end(f"{_LOST} {_brief(error)}")
        else:
            self._unanswered = 0
            if announced is not None and any(
                completed < reached.get(name, 0) for name, completed in announced.exchanges.items()
            ):
                self._end(announced.text)

    def linger(self) -> None:
        """Keep the store up until the others have read why this process ends."""
        until = time.monotonic() + LINGER_S
        with contextlib.suppress(Exception):
            assert self._board is not None
            while _store_is_served_here() and self._board.signed(_FINAL) < self._ranks:
                if time.monotonic() > until:
                    return
                time.sleep(PAUSE_S)

    def _call_roll(self) -> None:
        """Wait until no rank is in the pass in which this one failed.

        Were any, this rank's next exchange would be taken for the one that it left out.
        """
        key = str(self._failed)
        until = time.monotonic() + ROLL_CALL_S
        assert self._board is not None
        try:
            places = {f"{key}/{each.name}/{each.entered}": each.ranks for each in self._counted}
            for place in places:
                self._board.signed(place, 1)
            self._board.signed(key, 1)
            while self._board.signed(key) < self._ranks and self._over is None:
                if final := self._board.read(_FINAL):
                    self._end(final.text)
                elif time.monotonic() > until:
                    rank = f"rank {dist.get_rank()}"
                    self._end(f"some ranks did not leave the pass that failed on {rank}")
                time.sleep(PAUSE_S)
            if self._over is None and any(self._board.signed(at) < of for at, of in places.items()):
                # On the CPU what one left in flight would take another's next message for its own.
                self._end(_OUT_OF_STEP.format(who="ranks"))
        except Exception as error:
            self._end(f"{_LOST} {_brief(error)}")
        if self._over is not None:
            raise RankFailed(self._over)
        self._failed += 1
        self._failing = False

    def _explain(self, error: BaseException) -> None:
        """Raise the reason for a transport's error; return if it is none."""
        others = RankFailed | torch.OutOfMemoryError
        no_other = self._ranks == 1 or self._alone
        if no_other or not isinstance(error, RuntimeError) or isinstance(error, others):
            return
        reason = self._over
        if reason is None:
            reason = (
                f"rank {dist.get_rank()} could not exchange with another rank, and no rank has "
                "reported an error: one was killed (by its host for lack of memory?), was cut "
                f"off, or took longer than the group's time-out; {_brief(error)}"
            )
            try:
                assert self._board is not None
                known = self._board.read(_FINAL) or self._board.read(str(self._failed))
                reason = known.text if known else reason
            except Exception:
                reason += f"; {_LOST}"
            reason = self._end(reason)  # for whoever waits for this rank
        raise RankFailed(reason) from error

    def _give_up(self, reason: str) -> str:
        """Tell the others that this rank exchanges no more; returns the first such reason."""
        assert self._board is not None
        reason = self._board.put(_FINAL, Announcement(reason, {self.exchanges.name: -1}))
        self._board.signed(_FINAL, 1)
        return reason

    def _end(self, reason: str) -> str:
        """End all waits here, and inform the others; return the first reason of any rank."""
        with contextlib.suppress(Exception):
            reason = self._give_up(reason)
        self._over = reason  # before the main thread sees what breaking does
        break_all(self._backends)
        return reason


def _brief(error: BaseException) -> str:
    """Type and text of an error, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 1] + "…"


def _store_is_served_here() -> bool:
    """Whether the default store ends with this process."""
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Files and memory have no server.
    return dist.get_rank() == 0 and hasattr(store, "port") and not by_torchrun


# The thread that looks after waits, and the hook that sees the process end: one per process.

_watched: weakref.WeakSet[Failures] = weakref.WeakSet()
_lock = threading.Lock()
_stop = threading.Event()
_thread: threading.Thread | None = None
_previous_hook: Any = None
_aborting: list[threading.Thread] = []
os.register_at_fork(after_in_child=_watched.clear)  # nothing is announced in a fork


def watch(failures: Failures) -> None:
    """Add ``failures`` to those that the process's one thread watches, for as long as they live."""
    global _thread, _previous_hook
    with _lock:
        _watched.add(failures)
        if _thread is None:
            _previous_hook, sys.excepthook = sys.excepthook, _announce_final
            _thread = threading.Thread(target=_keep_looking, name="fcdp failures", daemon=True)
            _thread.start()
            atexit.register(_stop_looking)


def _keep_looking() -> None:
    while not _stop.wait(POLL_S):
        _look_once()


def _look_once() -> None:
    with _lock:
        watched = list(_watched)
    for failures in watched:
        failures.look()


def _stop_looking() -> None:
    """End the thread before the interpreter: inside of the store's code it could not be."""
    _stop.set()
    if _thread is not None:
        _thread.join(timeout=POLL_S)
    _join(_aborting)  # nor inside of NCCL's


def _announce_final(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Announce an error that nobody caught, wherever in this process's main thread."""
    watched = list(_watched)
    for failures in watched:
        failures.announce(error, final=True)
    _previous_hook(kind, error, trace)
    if isinstance(error, Exception):  # a user who interrupts is not kept waiting
        for failures in watched:
            failures.linger()


# Ending exchanges under way, from another thread than the one that waits for them.


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Backends of the group, which may have one for CUDA tensors and another for the CPU's."""
    backends = (group._get_backend(device) for device in group._device_types)
    return list({id(backend): backend for backend in backends}.values())


def every_backend() -> list[Any]:
    """Backends of all groups that this process is in."""
    return [backend for group in [*_world.pg_map] for backend in backends_of(group)]


def break_all(backends: Sequence[Any]) -> None:
    """Make every wait for these backends fail; the backends cannot be used afterwards."""
    for backend in filter(_is_gloo, backends):
        _break_gloo(backend)
    # NCCL's abort waits for the device, where another communicator's exchange may be stuck: each in
    # a thread. NCCL's groups of calls are a thread's, and PyTorch aborts in threads of its own.
    begun = []
    for backend in backends:
        if not _is_gloo(backend):
            thread = threading.Thread(target=_abort, args=(backend,), daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had: the interpreter ends
                thread.start()
                begun.append(thread)
    _aborting.extend(begun)
    _join(begun)


def _abort(backend: Any) -> None:
    with contextlib.suppress(Exception):
        backend.abort()


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads to end, all together for so long that a stuck one keeps no process."""
    until = time.monotonic() + LINGER_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _is_gloo(backend: Any) -> bool:
    """Whether the host waits for this backend's exchanges."""
    return bool(backend.name() == "gloo")


def _break_gloo(backend: Any) -> None:
    """Close all connections of a gloo backend, which knows no abort.

    A receive that times out does so, under whoever waits for the others.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1
    for tag in range(_UNUSED_TAG, _UNUSED_TAG + interfaces):
        for peer in range(backend.size()):
            # One whose connection is closed already fails at once, and closes no others.
            with contextlib.suppress(RuntimeError):
                if peer != backend.rank():
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    backend.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))

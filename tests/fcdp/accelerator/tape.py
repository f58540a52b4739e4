"""A record of what streams, host threads and ranks did to memory, and which of it races.

Every operation is noted with the bytes that it read and wrote and with what was waited for before
it: a vector clock per stream and host thread. Two operations that touch the same bytes, one of them
writing, must be ordered by waits. Where they are not, some schedule of a GPU runs them the other
way round. That is looked at for all pairs, and so for all schedules at once. :meth:`Tape.replay`
draws single ones besides: it runs the operations in any order that the waits allow, and checks that
each reads the bytes that it read when they were issued.
"""

from __future__ import annotations

import linecache
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

#: Operations by timeline: how many of each are known to have ended.
Clock = dict["Timeline", int]


class Timeline:
    """A stream or a thread of the host: what is done on it is done in the order of issue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        #: Clocks that were waited for since the last operation.
        self._news: Clock = {}
        self.operations: list[Operation] = []

    def wait_for(self, clock: Clock) -> None:
        """Run what comes next on this timeline after all that ``clock`` has seen."""
        mine = self.clock
        for timeline, count in clock.items():
            if timeline is not self and mine.get(timeline, 0) < count:
                mine[timeline] = self._news[timeline] = count

    def append(self, operation: Operation) -> None:
        operation.after, self._news = self._news, {}
        self.operations.append(operation)
        self.clock[self] = len(self.operations)

    def has_seen(self, operation: Operation) -> bool:
        """Whether what comes next on this timeline comes after ``operation``."""
        return self.clock.get(operation.timeline, 0) >= operation.number


class Region(NamedTuple):
    """Some bytes of a block."""

    first: int
    end: int
    #: One bit per byte; ``None``: all of them between the two.
    mask: int | None
    index: slice | np.ndarray

    def meets(self, other: Region) -> bool:
        """Whether both have a byte in common."""
        if max(self.first, other.first) >= min(self.end, other.end):
            return False
        return self.mask is other.mask is None or bool(_bits(self) & _bits(other))

    def covers(self, other: Region) -> bool:
        """Whether this has all bytes of the other."""
        if other.first < self.first or self.end < other.end:
            return False
        return self.mask is None or not _bits(other) & ~self.mask


def _dense(first: int, end: int) -> Region:
    return Region(first, end, None, slice(first, end))


def _bits(region: Region) -> int:
    return (1 << region.end) - (1 << region.first) if region.mask is None else region.mask


@cache
def region(start: int, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Region:
    """List the bytes of a tensor: ``start`` is in elements."""
    numel = math.prod(sizes)
    dense = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if all(size == 1 or have == row for size, have, row in zip(sizes, strides, dense, strict=True)):
        return _dense(start * itemsize, (start + numel) * itemsize)
    places = np.array([start], dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        places = (places[:, None] + np.arange(size) * stride).ravel()
    places = np.unique(places)
    bytes_ = (places[:, None] * itemsize + np.arange(itemsize)).ravel()
    first, end = int(bytes_[0]), int(bytes_[-1]) + 1
    if end - first == len(bytes_):
        return _dense(first, end)
    bits = np.zeros(end, dtype=np.uint8)
    bits[bytes_] = 1
    mask = int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
    return Region(first, end, mask, bytes_)


@dataclass(eq=False)
class Block:
    """A piece of physical memory, which several tensors may have one after another."""

    name: str
    nbytes: int
    #: Operations that touched it, as long as something may come that is not ordered after it.
    touched: list[tuple[Operation, Region, bool]] = field(default_factory=list)


class Touch(NamedTuple):
    """An operation's use of some bytes, and what they held then."""

    block: Block
    region: Region
    contents: bytes


@dataclass(eq=False)
class Operation:
    """One thing that a stream or the host did."""

    what: str
    where: str
    timeline: Timeline
    number: int
    reads: Sequence[Touch]
    writes: Sequence[Touch]
    #: Clocks that it waits for beyond what the one before it on its timeline does.
    after: Clock = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.what} on {self.timeline.name}, {self.where}"


class Tape:
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []
        #: In the order of issue: of each rank's alike whenever the run is repeated.
        self.operations: list[Operation] = []
        #: Pairs that nothing orders, as sentences.
        self.races: list[str] = []

    def timeline(self, name: str) -> Timeline:
        made = Timeline(name)
        self.timelines.append(made)
        return made

    def note(
        self, timeline: Timeline, what: str, reads: Sequence[Touch], writes: Sequence[Touch]
    ) -> Operation:
        """Note an operation, and whatever touched its bytes and is not ordered before it."""
        number = len(timeline.operations) + 1
        operation = Operation(what, _where(), timeline, number, reads, writes)
        for touches, writing in ((reads, False), (writes, True)):
            for touch in touches:
                self._touch(operation, touch, writing)
        timeline.append(operation)
        self.operations.append(operation)
        return operation

    def _touch(self, operation: Operation, touch: Touch, writing: bool) -> None:
        block, region = touch.block, touch.region
        timeline, remaining = operation.timeline, []
        for earlier in block.touched:
            other, others, wrote = earlier
            ordered = timeline.has_seen(other) or other is operation
            if not ordered and (writing or wrote) and region.meets(others):
                self.races.append(_story(block, other, wrote, operation, writing))
            # Whoever comes after this one comes after what it replaces, too.
            replaces = ordered and (writing or (not wrote and other.timeline is timeline))
            if not (replaces and region.covers(others)):
                remaining.append(earlier)
        block.touched = [*remaining, (operation, region, writing)]

    def replay(self, seed: int) -> str | None:
        """Run all operations in an order drawn from ``seed``; return a wrong read, if any."""
        chance = random.Random(seed)
        memory = {block: held.copy() for block, held in self._at_first.items()}
        done = dict.fromkeys(self.timelines, 0)
        left = [timeline for timeline in self.timelines if timeline.operations]
        # Some are slow, as a link is beside a copy engine.
        speed = {timeline: 10 ** chance.uniform(-2, 0) for timeline in left}
        while left:
            weights = [speed[timeline] for timeline in left]
            for timeline in chance.choices(left, weights, k=64):
                # As early as the waits allow: after what it waits for, and nothing else.
                asked = [timeline] if done[timeline] < len(timeline.operations) else []
                while asked:
                    operation = asked[-1].operations[done[asked[-1]]]
                    first = next((t for t, n in operation.after.items() if done[t] < n), None)
                    if first is not None:
                        asked.append(first)
                        continue
                    if (wrong := _run(operation, memory)) is not None:
                        return f"schedule {seed}: {wrong}"
                    done[asked.pop()] += 1
            left = [timeline for timeline in left if done[timeline] < len(timeline.operations)]
        return None

    @cached_property
    def _at_first(self) -> dict[Block, np.ndarray]:
        """Contents of blocks before the first operation, as read before they were written.

        Asked for once the run has ended.
        """
        memory: dict[Block, np.ndarray] = {}
        written: dict[Block, np.ndarray] = {}
        for operation in self.operations:
            for block, _, _ in (*operation.reads, *operation.writes):
                if block not in memory:
                    memory[block] = np.zeros(block.nbytes, dtype=np.uint8)
                    written[block] = np.zeros(block.nbytes, dtype=bool)
            for block, where, contents in operation.reads:
                values = np.frombuffer(contents, dtype=np.uint8)
                unset = ~written[block][where.index]
                memory[block][where.index] = np.where(unset, values, memory[block][where.index])
            for block, where, _ in operation.writes:
                written[block][where.index] = True
        return memory


def _run(operation: Operation, memory: dict[Block, np.ndarray]) -> str | None:
    for block, where, contents in operation.reads:
        if memory[block][where.index].tobytes() != contents:
            return f"{operation} reads other bytes of {block.name}"
    for block, where, contents in operation.writes:
        memory[block][where.index] = np.frombuffer(contents, dtype=np.uint8)
    return None


def _story(block: Block, first: Operation, wrote: bool, second: Operation, writes: bool) -> str:
    did, does = ("wrote" if wrote else "read"), ("writes" if writes else "reads")
    return (
        f"{block.name}: {second.what} {does} what {first.what} {did}, and nothing orders them.\n"
        f"  first:  {first}\n  second: {second}\n"
        f"  missing: {second.timeline.name} has not waited for operation {first.number} of "
        f"{first.timeline.name}"
    )


def _where() -> str:
    """The innermost lines of the library and of FSDP2 that led here."""
    frame, callers = sys._getframe(2), []
    while frame is not None and len(callers) < 3:
        name = frame.f_code.co_filename
        if ("/fcdp/" in name and "/accelerator/" not in name) or "/_fully_shard/" in name:
            callers.append(f"{name.rsplit('/', 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(callers) or "the test"


def made_by() -> str:
    """The source of the line, outside of this package, that asked for something to be made."""
    frame = sys._getframe(1)
    while frame is not None and "/accelerator/" in frame.f_code.co_filename:
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line.split(" = ")[0].removeprefix("self.")

"""Fuyou's cost model: a step's time by the activations that are moved instead of recomputed.

Forward and backward take as long as the busiest of what works in them: the device, the link each
way, the SSDs, the optimizer on the CPU; a step whose writes are delayed at least as long as the
SSDs take for all of it. The time is convex in the bytes that are moved when those are chosen by
benefit. Where host memory that activations leave free has parameters, it need not be: all amounts
are compared. Plain numbers: imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Item:
    """An activation that may be kept: its bytes, and the operations that backward is spared."""

    nbytes: float
    flops: float

    @property
    def benefit(self) -> float:
        return self.flops / self.nbytes


@dataclass(frozen=True)
class Work:
    """Work of a step."""

    #: Floating-point operations of forward, and those of them that backward computes again when
    #: nothing is kept.
    flops: float
    recomputed: float
    #: Bytes of parameters: moved to the device in each pass, and read from SSD unless they are in
    #: host memory.
    parameters: float
    #: Bytes of gradients that leave the device.
    gradients: float
    #: Bytes of state that the optimizer reads from SSD, and those that it writes.
    state_read: float
    state_written: float
    #: Bytes that pass between blocks, which are always kept.
    between: float
    items: tuple[Item, ...]
    #: Whether state is written in the next forward too.
    delayed: bool = False


@dataclass(frozen=True)
class Rates:
    """Work per second."""

    flops: float
    #: Bytes over the link to the device, each way.
    link: float
    read: float
    write: float
    #: Seconds of the optimizer on the CPU, of all parameters.
    adam: float
    #: Bytes of host memory for activations, and for parameters if they leave some.
    dram: float
    keeps_parameters: bool = False
    #: Whether SSDs read and write at once.
    duplex: bool = False

    def disk(self, read: float, written: float) -> float:
        """Seconds of SSDs to move so many bytes."""
        seconds = (read / self.read, written / self.write)
        return max(seconds) if self.duplex else sum(seconds)


def by_benefit(items: Sequence[Item]) -> list[int]:
    """Places of the items, those first that spare most operations per byte."""
    return sorted(range(len(items)), key=lambda place: -items[place].benefit)


def seconds(work: Work, rates: Rates, nbytes: float, spared: float) -> float:
    """The time of a step that keeps so many bytes of items, which spare so many operations."""
    moved = work.between + nbytes
    on_ssd = max(0.0, moved - rates.dram)
    left = max(0.0, rates.dram - moved) if rates.keeps_parameters else 0.0
    read = max(0.0, work.parameters - left)
    forward = max(
        work.flops / rates.flops,
        work.parameters / rates.link,  # to the device
        moved / rates.link,  # from the device
        rates.disk(read, on_ssd),
    )
    read_back, written = read + work.state_read + on_ssd, work.state_written
    backward = max(
        (2 * work.flops + work.recomputed - spared) / rates.flops,
        (work.parameters + moved) / rates.link,
        work.gradients / rates.link,
        rates.disk(read_back, 0.0 if work.delayed else written),
        rates.adam,
    )
    # SSDs in both together, where a step need not wait for what it writes.
    whole = rates.disk(read + read_back, on_ssd + written) if work.delayed else 0.0
    return max(whole, forward + backward)


def curve(work: Work, rates: Rates) -> list[tuple[float, float]]:
    """Bytes of items that are kept, and the step's seconds, for none to all of them by benefit."""
    ordered = [work.items[place] for place in by_benefit(work.items)]
    nbytes = accumulate((item.nbytes for item in ordered), initial=0.0)
    spared = accumulate((item.flops for item in ordered), initial=0.0)
    return [(n, seconds(work, rates, n, s)) for n, s in zip(nbytes, spared, strict=True)]


def chosen(work: Work, rates: Rates) -> int:
    """How many items to keep for the shortest step. Of equal times, the fewest."""
    times = [step for _, step in curve(work, rates)]
    least = min(times)
    # Equal times that rounding sets apart count as equal.
    return next(count for count, step in enumerate(times) if step <= least * (1 + 1e-12))

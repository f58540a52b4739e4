"""What the profiling step tells, and what is kept from then on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from baselines.fuyou import cost
from baselines.fuyou.blocks import Product, Profile
from baselines.fuyou.copies import Copies
from baselines.fuyou.cost import Rates, Work
from baselines.fuyou.disk import WAYS, Disk, Way
from baselines.fuyou.layout import Layout
from baselines.fuyou.optimizer import Adam
from baselines.settings import FuyouSettings
from fcdp.sizes import parse

#: Of the operations of forward, those of forward, of backward, and of forward again.
_PASSES = 4
#: Bytes per second of what nothing has passed.
_ENDLESS = 1e12


@dataclass
class Choice:
    """What later steps keep."""

    kept: frozenset[Product]
    #: Bytes of what is kept, and with what passes between blocks.
    nbytes: float
    moved: int
    #: What the model makes of a step.
    seconds: float
    #: Blocks whose parameters stay in host memory.
    cached: int = 0
    #: Buffers of optimizer state.
    buffers: int = 1


class Observed:
    """One step, as it was seen."""

    def __init__(self, disk: Disk, copies: Copies, adam: Adam) -> None:
        self._disk = disk
        self._copies = copies
        self._adam = adam
        self._adam_before = adam.seconds
        self._moved_before = {way: disk.moved(way) for way in WAYS}
        self._seconds = 0.0
        self._micro_batches = 0

    def computed(self, seconds: float) -> None:
        """Count a micro-batch, which took the device so long."""
        self._seconds += seconds
        self._micro_batches += 1

    def work(self, layout: Layout, profile: Profile, settings: FuyouSettings) -> Work:
        """What a step of one micro-batch does."""
        trained = [group for group in layout.groups() if group.trained]
        parameters = sum(unit.compute_bytes for unit in layout.blocks)
        gradients = sum(group.numel for group in trained) * layout.dtype.itemsize
        after = settings.update == "after"
        read = sum(group.nbytes for group in trained)
        if len(trained) and trained[0].computed.name == "compute":
            read -= sum(group.computed.nbytes for group in trained)
        aside = sum(group.gradient_bytes for group in trained)
        written = sum(group.nbytes for group in trained)
        return Work(
            flops=profile.flops,
            recomputed=profile.flops,
            parameters=parameters,
            gradients=gradients,
            state_read=0 if after else read,
            state_written=aside if after else written,
            between=profile.between,
            items=tuple(profile.items.values()),
            delayed=settings.update == "delayed",
        )

    def rates(self, profile: Profile, settings: FuyouSettings, room: int, buffers: int) -> Rates:
        """How fast it was done.

        ``room``: host memory for activations; ``buffers``: of optimizer state, with one of which
        nothing is read while something is written.
        """
        seconds = self._seconds / self._micro_batches
        after = settings.update == "after"
        return Rates(
            flops=_PASSES * profile.flops / seconds,
            link=self._copies.nbytes / self._copies.seconds if self._copies.seconds else _ENDLESS,
            read=self._disk_rate("read", settings),
            write=self._disk_rate("write", settings),
            adam=0.0 if after else self._adam.seconds - self._adam_before,
            dram=room,
            keeps_parameters=True,
            duplex=settings.ssd_limit is not None and buffers > 1,
        )

    def _disk_rate(self, way: Way, settings: FuyouSettings) -> float:
        """Bytes per second of the SSD in this step, no more than its limit lasts.

        A control group lets the first megabytes pass faster than its limit.
        """
        nbytes, seconds = (
            now - then
            for now, then in zip(self._disk.moved(way), self._moved_before[way], strict=True)
        )
        return min(nbytes / seconds if seconds else _ENDLESS, settings.ssd_limit or _ENDLESS)


def choose(work: Work, rates: Rates, profile: Profile, settings: FuyouSettings) -> Choice:
    """The products to keep: by benefit, as many as the cell says or the model finds best."""
    ordered = cost.by_benefit(work.items)
    sums = [*accumulate((work.items[place].nbytes for place in ordered), initial=0.0)]
    if settings.swap == "auto":
        count = cost.chosen(work, rates)
    elif settings.swap in ("none", "all"):
        count = len(ordered) if settings.swap == "all" else 0
    else:
        most = parse(settings.swap)
        count = max(count for count, nbytes in enumerate(sums) if nbytes <= most)
    products = list(profile.items)
    return Choice(
        kept=frozenset(products[place] for place in ordered[:count]),
        nbytes=sums[count],
        moved=int(sums[count]) + profile.between,
        seconds=cost.curve(work, rates)[count][1],
    )

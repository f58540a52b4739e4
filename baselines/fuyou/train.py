"""Training with all state on SSD: one device, exact.

A step of three blocks, whose optimizer is overlapped::

    device     load root | F0 F1 F2 | B2 B1 B0 | root's gradient
    SSD reads   0 1 2  state of 2, 1; then of 0 and root
    CPU                                  Adam 2, 1, 0, root
    SSD writes                             2, 1, 0, root; then the record of the step

The device may be the CPU, whose memory counts as the device's beyond what host memory has.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn as nn

from baselines.fuyou import cost, memory
from baselines.fuyou.blocks import Profile, Recomputed
from baselines.fuyou.cost import Rates, Work
from baselines.fuyou.fifo import Fifo
from baselines.fuyou.layout import FLOAT, Group, Layout, laid_out
from baselines.fuyou.memory import Dram
from baselines.fuyou.optimizer import BUFFERS, Adam, Updates
from baselines.fuyou.store import Store
from baselines.fuyou.swap import Swapper
from baselines.fuyou.transfers import WAYS, Copies, Disk, Limited, Way
from baselines.generations import STATE
from baselines.optimizers import AdamW
from baselines.settings import FuyouSettings
from baselines.ssd import left_over
from baselines.strategy import Job, Trainable
from fcdp.sizes import parse, written

#: Operations of a step over those of forward: forward, backward (twice), and forward again.
_PASSES = 4
#: Bytes per second of a way that nothing has passed.
_ENDLESS = 1e12


class Observed:
    """Measurements of one step."""

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
        """Work of a step of one micro-batch."""
        trained = [group for group in layout.groups() if group.trained]
        parameters = sum(layer.compute_bytes for layer in layout.blocks)
        gradients = sum(group.numel for group in trained) * layout.dtype.itemsize
        after = settings.update == "after"
        aside = sum(group.gradient_bytes for group in trained)
        written = sum(group.nbytes for group in trained)
        computed = (group.computed for group in trained)
        read = written - sum(part.nbytes for part in computed if part.name == "compute")
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


def chosen(work: Work, rates: Rates, swap: str) -> int:
    """How many of the items to keep, by benefit: as the cell says, or best by the cost model."""
    if swap == "auto":
        return cost.chosen(work, rates)
    if swap == "all":
        return len(work.items)
    most = 0 if swap == "none" else parse(swap)
    return max(n for n, (nbytes, _) in enumerate(cost.curve(work, rates)) if nbytes <= most)


#: The step that is profiled: the first is no measure, as nothing has its place in caches yet.
_PROFILED = 2
#: Prefix of folders that ``build`` makes; runs are resumed in others.
_PREFIX = "fuyou-run-"


def build(model: nn.Module, job: Job) -> Fuyou:
    """Train in a new folder, which is removed when the run ends."""
    settings = job.settings
    assert isinstance(settings, FuyouSettings)
    for old in Path(settings.ssd or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if left_over(old / STATE):  # of a run that was killed
            shutil.rmtree(old, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=settings.ssd))
    except OSError as error:
        raise ValueError(
            f"ssd = {settings.ssd!r}: must be a folder that can be written ({error.strerror})"
        ) from error
    cleared = weakref.finalize(job.topology, shutil.rmtree, folder, ignore_errors=True)
    try:
        made = Fuyou(model, job, folder)
    except BaseException:
        cleared()
        raise
    made.on_failure = cleared
    return made


class Fuyou(Trainable):
    """A model whose state lies in a folder."""

    #: Called when a step has failed, as the rank then ends without its usual clean-up.
    on_failure: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, model: nn.Module, job: Job, folder: Path) -> None:
        """Go on from the last complete step in ``folder``, or begin there with the model's values.

        Raises ``ValueError`` for more ranks than one, another optimizer than AdamW, budgets that
        are too small, and a folder of another model, without room, or in use.
        """
        super().__init__(model, job, 0.0)
        settings = job.settings
        assert isinstance(settings, FuyouSettings)
        if (ranks := job.topology.world_size) != 1:
            raise ValueError(f"ranks = {ranks}: allowed is 1, one device, for fuyou")
        if not isinstance(job.optimizer, AdamW):
            raise ValueError(f"optimizer = {job.optimizer.kind!r}: allowed is 'adamw' for fuyou")
        self._settings = settings
        self._limited = settings.ssd_limit and Limited(folder, settings.ssd_limit)
        self._device = torch.device(job.topology.mesh.device_type)
        aside = job.accumulation > 1 or settings.update == "after"
        self._layout = laid_out(model, job.blocks, job.dtype, aside=aside)
        self._disk = Disk()
        self._store = Store(folder, self._layout, self._disk)
        self._dram = Dram(int(parse(settings.dram_budget)), self._device)
        self._copies = Copies(self._device)
        self._put_away()
        model.to(self._device)
        slots = settings.blocks_on_device
        self._fifo = Fifo(self._layout, self._store, self._dram, self._copies, slots)
        groups = self._layout.backward_order()
        self._adam = Adam(job.optimizer, job.learning_rate)
        self._updates = Updates(
            settings.update,
            self._store,
            self._adam,
            groups,
            self._dram,
            self._fifo.renew,
            sums=job.accumulation > 1,
        )
        self._check_device()
        self._swapper = Swapper(self._dram, self._disk, self._copies, folder)
        self._recomputed = Recomputed(
            job.blocks,
            self._fifo,
            self._swapper,
            lambda block: self._collect(self._layout.blocks[block].trained),
            self._device,
        )
        self._last = True
        self._broken = False
        #: Metrics of that choice; none before the profiling step.
        self._chosen: dict[str, float] = {}
        self._until_choice = _PROFILED
        self._device_peak = 0
        self._steps = 0
        self._counted = (0, 0)
        if self._device.type == "cpu":
            memory.give_back_at_once()
        self._baseline = memory.taken("VmRSS") - self._dram.nbytes - self._fifo.device_bytes

    @property
    def steps_done(self) -> int:
        """Steps whose state is complete on SSD; the last may not be where writes are delayed."""
        return self._store.step

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One step, which counts once its record is on SSD: where writes are delayed, in the next.

        Raises ``RuntimeError`` after a step that failed: the folder has the last complete one.
        """
        try:
            self._require_whole()
            self._broken = True
            memory.forget_peak()
            observed = Observed(self._disk, self._copies, self._adam)
            total = torch.zeros((), device=self._device)
            self._updates.begin()
            for index, batch in enumerate(micro_batches):
                total += self._micro_batch(batch, observed, last=index == len(micro_batches) - 1)
            with self._timed("optimizer"):
                self._updates.finish()
                self._measure()  # before the step counts: a resumed run repeats it
                self._updates.commit()
            self._steps += 1
            self._until_choice -= 1
            if self._until_choice == 0:
                self._choose(observed)
        except BaseException:
            self.on_failure()
            raise
        self._broken = False
        return total

    def _micro_batch(self, batch: torch.Tensor, observed: Observed, *, last: bool) -> torch.Tensor:
        blocks = range(len(self._layout.blocks))
        self._last = last
        self._recomputed.profile = Profile()
        self._fifo.expect([*blocks, *reversed(blocks)])
        waited = self._copies.waited
        begin = time.perf_counter()
        with self._timed("forward"):
            loss = self.job.loss(self.model, batch) / self.job.accumulation
        with self._timed("backward"):
            loss.backward()
            self._collect(self._layout.root.trained)
        observed.computed(time.perf_counter() - begin - (self._copies.waited - waited))
        self._fifo.stop()
        self._swapper.clear()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        self._fifo.expect(range(len(self._layout.blocks)))
        measured = super().evaluate(batch)
        self._fifo.stop()
        return measured

    def parameters(self) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor]]]:
        """Each parameter of the last complete step: its name, values and moments.

        Float32, or what is computed with where it is frozen, without moments. Raises
        ``RuntimeError`` after a step that failed.
        """
        self._require_whole()
        self._updates.flush()
        largest = max(group.nbytes for group in self._layout.groups())
        idle = self._updates.ring.idle()
        buffer = idle if idle.numel() >= largest else self._dram.take(largest, "a group")
        try:
            for group in self._layout.groups():
                yield from self._store.take_out(group, buffer)
        finally:
            if buffer is not idle:
                self._dram.give_back(buffer)

    def settle(self) -> None:
        """Wait until the last step counts. Raises what went wrong in its writes."""
        if not self._broken:
            self._updates.flush()

    def take_metrics(self) -> dict[str, float]:
        """Bytes per step that were kept of activations, and read and written; memory at its peak.

        ``modelled_seconds``: what the cost model makes of a step with what was chosen.
        """
        self.settle()
        steps, self._steps = max(self._steps, 1), 0
        counts = self._swapper.take_counts()
        read, written_bytes = (self._disk.nbytes[way] for way in ("read", "write"))
        before, self._counted = self._counted, (read, written_bytes)
        metrics: dict[str, float] = {
            "dram_peak_bytes": self._dram.peak,
            "kept_bytes": sum(counts.values()) / steps,
            "kept_on_ssd_bytes": counts["ssd"] / steps,
            "ssd_read_bytes": (read - before[0]) / steps,
            "ssd_written_bytes": (written_bytes - before[1]) / steps,
        }
        if self._device.type == "cpu":
            metrics["peak_device_bytes"] = self._device_peak
        return metrics | self._chosen

    def close(self) -> None:
        """End the threads; the folder may be opened by others then, and this trains no more.

        Raises what went wrong in the writes of the last step, which does not count then.
        """
        try:
            self.settle()
        finally:
            self._broken = True
            self._updates.close()
            self._fifo.close()
            self._disk.close()
            self._store.close()
            if self._limited:
                self._limited.leave()

    def _require_whole(self) -> None:
        if self._broken:
            with suppress(Exception):
                self._updates.flush()  # the step before may count yet
            raise RuntimeError(
                f"a step failed; open the folder anew to go on from step {self.steps_done}"
            )

    def _collect(self, groups: Sequence[Group]) -> None:
        """Hand the gradients of groups over to the optimizer."""
        for group in groups:
            gradients = []
            for name, param in zip(group.names, group.params, strict=True):
                if param.grad is None:
                    raise RuntimeError(
                        f"{name}: has no gradient; must be one that every micro-batch trains"
                    )
                gradients.append(param.grad)
            with self._copies.waiting():
                gradient = self._updates.memory()
            landed = self._copies.out(group.views(gradient, torch.float32), gradients)
            for param in group.params:
                param.grad = None
            self._updates.submit(group, gradient, landed, last=self._last)

    def _put_away(self) -> None:
        """Write the model's parameters to SSD, and free their memory."""
        resume = self._store.resumes
        largest = max(group.nbytes for group in self._layout.groups())
        buffer = self._dram.take(largest, "the largest group of parameters")
        for group in self._layout.groups():
            if not resume:
                self._store.put_in(group, buffer)
            for param in group.params:
                param.data = torch.empty(0, dtype=self._layout.dtype)
        if not resume:
            self._store.commit(0)
        self._dram.give_back(buffer)

    def _check_device(self) -> None:
        """Raises ``ValueError`` where the device has no room for parameters and gradients."""
        layers = [sum(g.gradient_bytes for g in layer.trained) for layer in self._layout.layers]
        gradients = layers[0] + max(layers[1:], default=0)
        gradients = gradients * self._layout.dtype.itemsize // FLOAT
        needed = self._fifo.device_bytes + gradients
        if needed > parse(self._settings.device_budget):
            raise ValueError(
                f"device_budget = {self._settings.device_budget}: parameters on the device and "
                f"their gradients take {written(needed)}; allowed is more than that"
            )

    def _measure(self) -> None:
        """Raises ``OutOfMemoryError`` if the step took more of the device than its budget."""
        if self._device.type == "cpu":
            grown = memory.taken("VmHWM") - self._baseline - self._dram.nbytes
        else:
            grown = torch.cuda.max_memory_allocated(self._device)
        self._device_peak = max(self._device_peak, grown)
        if grown > parse(self._settings.device_budget):
            raise torch.OutOfMemoryError(
                f"device_budget = {self._settings.device_budget}: a step took {written(grown)}, "
                "and does not count; allowed is at least that"
            )

    def _choose(self, observed: Observed) -> None:
        """Choose what later steps swap out, and the blocks that host memory then has room for."""
        profile, settings = self._recomputed.profile, self._settings
        spare = self._swapper.spare(item.nbytes for item in profile.items.values())
        buffers = self._deepen(spare)
        room = max(0, self._dram.free - spare)
        work = observed.work(self._layout, profile, settings)
        rates = observed.rates(profile, settings, room, buffers)
        count = chosen(work, rates, settings.swap)
        nbytes, seconds = cost.curve(work, rates)[count]
        products = list(profile.items)
        places = cost.by_benefit(work.items)[:count]
        self._recomputed.swapped = frozenset(products[place] for place in places)
        limit = min(room, int(nbytes) + profile.between)
        self._swapper.limit = limit
        self._chosen = {
            "chosen_bytes": nbytes,
            "modelled_seconds": seconds,
            "blocks_in_dram": self._fifo.cache(self._dram, spare + limit),
            "state_buffers": buffers,
        }

    def _deepen(self, spare: int) -> int:
        """Take buffers for the optimizer's state, and warn where there is no room for them."""
        ring = self._updates.ring
        most = min(BUFFERS[self._settings.update], len(self._layout.backward_order()))
        buffers = ring.deepen(most, spare)
        if buffers < most:
            warnings.warn(
                f"dram_budget = {self._settings.dram_budget}: has room for {buffers} of {most} "
                f"buffers of optimizer state, {written(ring.idle().numel())} each: steps are the "
                "same but take longer, as reads and writes wait for each other",
                stacklevel=2,
            )
        return buffers

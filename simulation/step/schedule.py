"""One training step of one rank as tasks, and the seconds of its passes and of the optimizer.

All ranks do the same at the same time. The order is FSDP2's, as docs/how-it-works.md has it, and
that of our library on each stream (tests/simulation/step/test_order.py). A gather begins once the
computation before the one that is running has ended, so that two units are gathered at most.
Computation waits for the reduction before the last one, whose buffer it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from baselines.schedule import Place
from simulation import traffic as collectives
from simulation.cycle import Stages
from simulation.hardware import Hardware, Work
from simulation.memory import Tiers, sum_bytes
from simulation.step.tasks import COMPUTE, Tasks, used
from simulation.traffic import Exchanges, Traffic
from simulation.units import Layout, Segment, Unit
from simulation.workload import (
    FP32,
    STATE_BYTES,
    Workload,
    block_bytes,
    block_kernels,
    block_passes,
    head_work,
    unpacked_bytes,
)

#: Bytes per element of a worker's update at the end of a round, in fp32: the displacement from
#: parameters and the round's start (three passes), momentum from the mean (three), the next round's
#: start from momentum (three), and parameters from that (two).
_ROUND_BYTES = 11 * FP32
#: Passes over gradients that are added to others: both are read, and the sum is written.
_ADDED = 3


def overhead_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds beside work and its bytes, in one forward or one backward of a block."""
    launches = hardware.rates.kernel_seconds * block_kernels(workload)
    overheads = hardware.overheads
    saved = workload.tokens * block_bytes(workload) * hardware.ranks_sharing_device
    calls = overheads.block_seconds.get(workload.engine, 0.0)
    return launches + (calls + overheads.activation_byte_seconds * saved) / 2


def block_seconds(workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """Seconds in which a rank computes forward and backward of a block."""
    beside = overhead_seconds(workload, hardware)
    each_pass = unpacked_bytes(workload) / hardware.rates.copied_bytes_per_s
    works = (work * workload.tokens for work in block_passes(workload))
    forward, backward = (hardware.seconds(work) + beside for work in works)
    return forward + each_pass, backward + (1 + workload.recomputed) * each_pass


def added_bytes(workload: Workload, hardware: Hardware) -> float:
    """Bytes that a rank reads and writes to add a further micro-batch's gradients to those before.

    They are of all parameters with replicas, and of a shard, which is seldom worth counting, else.
    """
    return _ADDED * sum_bytes(workload, hardware)


def adding_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds in which a rank does that, in each micro-batch but the first."""
    return added_bytes(workload, hardware) / hardware.rates.copied_bytes_per_s


def call_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds of calls for a block in the optimizer's step."""
    return hardware.overheads.step_seconds.get(workload.engine, 0.0)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds that a rank computes for each stage of a cycle: in one micro-batch, in its update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]

    @classmethod
    def of(cls, workload: Workload, stages: Stages, hardware: Hardware) -> StageSeconds:
        """Seconds of a workload's stages on ranks of this hardware; the last has the head."""
        tokens = workload.tokens
        head = [hardware.seconds(work * tokens) for work in head_work(workload)]
        forward, backward = block_seconds(workload, hardware)
        last = len(stages) - 1
        return cls(
            tuple(n * forward + head[0] * (at == last) for at, n in enumerate(stages.blocks)),
            tuple(n * backward + head[1] * (at == last) for at, n in enumerate(stages.blocks)),
            tuple(
                adam_seconds(workload, numel, hardware) + n * call_seconds(workload, hardware)
                for numel, n in zip(stages.trained, stages.blocks, strict=True)
            ),
        )


def adam_seconds(workload: Workload, elements: float, hardware: Hardware) -> float:
    """Seconds in which a rank's device steps so many parameters."""
    return workload.adam_bytes * elements / _rate(hardware)


def _rate(hardware: Hardware) -> float:
    """Bytes per second of a rank's device memory."""
    return hardware.device.memory_bytes_per_s / hardware.ranks_sharing_device


class _Move(NamedTuple):
    """An exchange of a gather, its stream, and bytes that have arrived on each rank with it."""

    traffic: Traffic
    stream: str
    arrived_bytes: float


class Step:
    """Builds the tasks of one steady step: caches hold what the step before has left."""

    def __init__(
        self,
        workload: Workload,
        units: Layout,
        tiers: Tiers,
        hardware: Hardware,
        *,
        sums_on_host: bool,
    ) -> None:
        """``sums_on_host``: whether gradients of micro-batches are summed up in host memory."""
        self.tasks = Tasks(hardware)
        self._workload = workload
        self._schedule = schedule = workload.schedule
        self._units = units
        self._tiers = tiers
        self._hardware = hardware
        self._exchanges = Exchanges(workload, hardware)
        self._sums_on_host = sums_on_host
        self._moves: dict[tuple[object, ...], tuple[Sequence[_Move], Mapping[Place, float]]] = {}
        self._gloo = hardware.backend == "gloo"
        #: Computation so far; ends of each reduction; the store of each unit's entry in this step.
        self._computed: list[int] = []
        self._reduced: list[tuple[int, ...]] = []
        self._stored: dict[Unit, int] = {}
        #: Copies of sums to the host so far, and the last one of each unit.
        self._sums_out: list[int] = []
        self._sums_of: dict[str, int] = {}
        #: Tasks that the previous gather waited for: prefetched copies may begin after them.
        self._latest_gather: tuple[int, ...] = ()
        #: Whether this micro-batch is the step's first, and its last; units that are gathered, and
        #: by which task; tasks that its gathers wait for.
        self._first = self._last = True
        self._gathered: dict[Unit, int | None] = {}
        self._wait_for_all: tuple[int, ...] = ()
        layers, block = workload.model.layers, workload.model.block_parameters
        lead = min(schedule.lead_per_block * layers, schedule.most_lead)
        last = [unit for segment in reversed(units.segments) for unit in segment.units]
        sums = accumulate(unit.parameters for unit in last)
        #: The last units of forward, which stay gathered into backward: up to so many parameters.
        self._over_turn = {u for u, sum_ in zip(last, sums, strict=True) if sum_ <= lead * block}
        self._seconds = self._segments_seconds()
        #: Seconds for which a block's gradients are added to those of earlier micro-batches.
        self._adding = adding_seconds(workload, hardware) / len(units.segments)
        #: Exchanges of reductions by trained parameters, and whether they are the step's last.
        self._reductions: dict[tuple[int, bool], Sequence[Traffic]] = {}

    def _segments_seconds(self) -> dict[tuple[int, float], Mapping[str, float]]:
        """Seconds of forward and backward by what segments have in common in most blocks."""
        workload, hardware, segments = self._workload, self._hardware, self._units.segments
        # Beside matrix products, in one forward or one backward of all blocks; and in each pass
        # through a block, whatever its tokens, in which 4 bits become bf16.
        beside = workload.total(lambda each: overhead_seconds(each, hardware)) / len(segments)
        unpacking = unpacked_bytes(workload) / hardware.rates.copied_bytes_per_s
        head = self._units.head
        known: dict[tuple[int, float], Mapping[str, float]] = {
            (head.kind, head.share): self._computed_seconds(head_work(workload))
        }
        for kind, share in {(segment.kind, segment.share) for segment in segments}:
            of = self._computed_seconds(block_passes(workload.parts[kind], share))
            known[kind, share] = {
                "forward": of["forward"] + beside + unpacking,
                "backward": of["backward"] + beside + (1 + workload.recomputed) * unpacking,
            }
        return known

    def _computed_seconds(self, works: tuple[Work, Work]) -> dict[str, float]:
        of = (self._hardware.seconds(work * self._workload.tokens) for work in works)
        return dict(zip(("forward", "backward"), of, strict=True))

    def build(self) -> Tasks:
        """The tasks of all micro-batches and of the optimizer. Call it once."""
        workload, tasks = self._workload, self.tasks
        for index in range(workload.accumulation):
            self._micro_batch(index)
        ends = [*self._computed[-1:], *chain.from_iterable(self._reduced)]
        if calls := workload.model.layers * call_seconds(workload, self._hardware):
            ends = [tasks.compute("calls", calls, ends)]
        self._optimizer(ends)
        if self._schedule.averages is not None:
            self._round()
        return tasks

    def _micro_batch(self, index: int) -> None:
        units, last = self._units, index == self._workload.accumulation - 1
        self._first, self._last = index == 0, last
        self._wait_for_all = tuple(self._computed[-1:])
        self._gathered = {}
        for segment in units.segments:
            self._run(segment, (units.root, *segment.units), "forward")
        self._run(units.head, (units.root,), "forward")
        self._run(units.head, (units.root,), "backward")
        waiting = 0
        for segment in reversed(units.segments):
            self._run(segment, segment.units if segment.in_backward else (), "backward")
            trained = [unit for unit in segment.units if unit.trained]
            waiting += sum(unit.trained for unit in trained)
            if segment.block:  # a vendor that gathers matrices reduces those of a block together
                name = trained[0].name if trained else segment.name
                self._reduce(name, self._reduced_by(waiting), waiting)
                waiting = 0
        in_root = units.root.trained
        if not self._schedule.replicates_small:
            replicas = self._exchanges.all_reduce(units.replicated_trained, last=last)
            self._reduce("replicas", replicas, units.replicated_trained)
        else:
            in_root += units.replicated_trained
        self._reduce("root", self._reduced_by(in_root), in_root)

    def _run(self, segment: Segment, needs: Sequence[Unit], phase: str) -> None:
        """Gather what the segment needs and is not gathered; compute; free what is not kept."""
        after = []
        for unit in needs:
            if unit not in self._gathered:
                self._gathered[unit] = self._gather(unit, phase)
            if (arrived := self._gathered[unit]) is not None:
                after.append(arrived)
        seconds = self._seconds[segment.kind, segment.share][phase]
        if phase == "backward" and segment is not self._units.head and not self._first:
            seconds += self._adding
        after += chain.from_iterable(self._reduced[-2:-1])
        self._computed.append(self.tasks.compute(f"{phase} {segment.name}", seconds, after))
        for unit in needs:
            if not unit.stays_gathered and unit not in self._over_turn:
                del self._gathered[unit]

    def _gather(self, unit: Unit, phase: str) -> int | None:
        """The last task of the unit's gather; ``None`` if nothing has to be done."""
        # It waits for the computation before the one that is running.
        after = begin = tuple(dict.fromkeys([*self._wait_for_all, *self._computed[-2:-1]]))
        tier, name = self._tiers.get(unit), f"{phase} gather {unit.name}"
        anew = tier is None or self._is_stale(unit, phase)
        moves, sources = self._moved(unit, anew)
        if not anew and not self._schedule.blocking:  # it is fetched ahead
            stored = [self._stored[unit]] if unit in self._stored else []
            begin = tuple(dict.fromkeys([*self._latest_gather, *stored]))
        self._latest_gather = start = after
        for place, size in sources.items():
            ready = begin
            if place == "disk":
                ready = (self.tasks.disk(f"{name} read", "read", size, phase, begin),)
            stream = "copy in"
            if self._schedule.blocking:
                stream = COMPUTE
            elif self._gloo:  # what is gathered anew is copied by the call that gathers it ahead
                stream = moves[0].stream if anew else COMPUTE
            title, link = f"{name} copy in", "host_to_device"
            copied = self.tasks.copy(title, link, stream, size, phase, ready)
            start = (copied,) if anew else (*start, copied)
        at = None
        for number, (traffic, stream, arrived) in enumerate(moves):
            at = self.tasks.exchange(name, stream, traffic, phase, start, arrived)
            start = (at,)
            if anew and number == 0 and self._keeps(unit):
                self._store(unit, phase, at)
        return at

    def _moved(self, unit: Unit, anew: bool) -> tuple[Sequence[_Move], Mapping[Place, float]]:
        """A gather's exchanges, and what is copied for it: the same in all passes."""
        # Most units are alike.
        key = unit.parameters, unit.gathered, unit.trained, self._tiers.get(unit), anew
        if key not in self._moves:
            exchanges = self._exchanges.gather(unit) if anew else [self._exchanges.spread(unit)]
            whole = self._exchanges.gathered_bytes(unit)
            moves = [
                _Move(each, self._gather_stream(number, each), whole * (each is exchanges[-1]))
                for number, each in enumerate(exchanges)
            ]
            self._moves[key] = moves, self._sources(unit, anew)
        return self._moves[key]

    def _sources(self, unit: Unit, anew: bool) -> dict[Place, float]:
        """Bytes that a gather copies to a rank's device, by where they are."""
        own = self._schedule.parameters
        sources: dict[Place, float] = {}
        if not anew:
            sources[self._tiers[unit]] = self._exchanges.slice_bytes(unit)
        if anew or not self._schedule.caches_own_shard:
            sources[own] = sources.get(own, 0.0) + self._exchanges.shard_bytes(unit)
        return {place: size for place, size in sources.items() if place != "device"}

    def _is_stale(self, unit: Unit, phase: str) -> bool:
        if self._schedule.cached_for == "micro-batch":
            return phase == "forward"
        outlived = unit.trained == 0 and self._schedule.cached_for == "change"
        return self._first and phase == "forward" and not outlived

    def _keeps(self, unit: Unit) -> bool:
        """Whether the cache takes what a gather has brought across nodes.

        Ours does not take what no gather reads before the optimizer changes it; a vendor's does.
        """
        read_again = unit.reuses > 0 or not self._last
        return unit in self._tiers and (read_again or self._schedule.cache != "policy")

    def _store(self, unit: Unit, phase: str, gathered: int) -> None:
        """Copy what a gather has brought into the unit's tier, mostly beside other tasks."""
        tier = self._tiers[unit]
        if tier == "device":
            return
        size = self._exchanges.slice_bytes(unit)
        name = f"{phase} store {unit.name}"
        stream = COMPUTE if self._schedule.blocking or self._gloo else "copy out"
        at = self.tasks.copy(name, "device_to_host", stream, size, phase, (gathered,))
        if tier == "disk":
            at = self.tasks.disk(f"{name} write", "write", size, phase, (at,))
        self._stored[unit] = at

    def _gather_stream(self, number: int, traffic: Traffic) -> str:
        """The stream of a gather's exchange.

        By gloo, with one thread, only a gather's first exchange runs ahead. On GPUs our library has
        a stream of its own for exchanges across nodes, which run ahead of those inside the node.
        """
        if self._gloo:
            ahead = number == 0 and self._schedule.gathers_ahead_on_host
            return "gather" if ahead else COMPUTE
        across = self._schedule.stages and traffic.inter_node_bytes > 0
        return "gather across" if across else "gather"

    def _reduced_by(self, trained: int) -> Sequence[Traffic]:
        """Exchanges that reduce so many parameters' gradients in this micro-batch."""
        key = trained, self._last
        if key not in self._reductions:
            self._reductions[key] = self._exchanges.reduce(trained, last=self._last)
        return self._reductions[key]

    def _reduce(self, name: str, exchanges: Sequence[Traffic], trained: int) -> None:
        if not trained:
            return
        after: tuple[int, ...] = tuple(self._computed[-1:])
        touched = float(trained * self._workload.reduced_bytes)
        stream = COMPUTE if self._gloo else "reduce"
        for number, traffic in enumerate(exchanges):
            title = f"reduce {name}"
            at = self.tasks.exchange(title, stream, traffic, "reduce", after, reduced_bytes=touched)
            after, touched = (at,), 0.0
            if number == 0 and self._sums_on_host:
                after = self._sum_up(name, trained, at)
        arrive = self._last or not self._schedule.accumulates_without_sync
        if self._schedule.optimizer != "device" and arrive:
            size = FP32 * trained / self._schedule.sharers(*self._hardware.shape)
            stream = COMPUTE if self._gloo else "copy out"
            title = f"gradients {name}"
            after = (self.tasks.copy(title, "device_to_host", stream, size, "reduce", after),)
        if after != tuple(self._computed[-1:]):
            self._reduced.append(after)

    def _sum_up(self, name: str, trained: int, reduced: int) -> tuple[int, ...]:
        """Add what a unit's ranks have reduced inside the node to its sum, which is on the host.

        The library copies the sum in, but for the first micro-batch, and out, but for the last, on
        streams of their own. A copy in begins when one of two buffers is free: when the sum before
        the last is out. Returns the tasks that what comes next among the reductions waits for.
        """
        nbytes, title = FP32 * trained / self._hardware.ranks_per_node, f"sum {name}"
        streams = (COMPUTE, COMPUTE) if self._gloo else ("sums in", "sums out")
        free = tuple(self._sums_out[-2:-1])
        ready = (reduced, *free)
        if not self._first:
            size = (title, "host_to_device", streams[0], nbytes, "reduce")
            ready = (reduced, self.tasks.copy(*size, (*free, self._sums_of[name])))
        if not self._last:
            size = (title, "device_to_host", streams[1], nbytes, "reduce")
            self._sums_of[name] = self.tasks.copy(*size, ready)
            self._sums_out.append(self._sums_of[name])
        return ready

    def _optimizer(self, ends: Sequence[int]) -> None:
        """Append the optimizer's step, which begins when all gradients are reduced."""
        tasks, workload = self.tasks, self._workload
        hardware, schedule, replicated = self._hardware, self._schedule, self._units.replicated
        mine = workload.trained / schedule.sharers(*hardware.shape)
        if schedule.optimizer == "device":
            at = tasks.compute("optimizer", adam_seconds(workload, mine, hardware), ends)
        else:
            of_node = mine * hardware.ranks_per_node
            demands = {"cpu": of_node / hardware.cpu_adam_elements_per_s}
            if schedule.optimizer == "disk":
                # Read, step and write follow one another as a pipeline.
                nbytes = STATE_BYTES * of_node
                rates = hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s
                demands["disk"] = sum(nbytes / rate for rate in rates)
                tasks.count("disk", "optimizer", 2 * nbytes)
            at = tasks.add("optimizer", "cpu", used(demands), ends)
            if schedule.parameters == "device":
                title, size = "updated parameters", workload.element_bytes * mine
                at = tasks.copy(title, "host_to_device", "copy in", size, "optimizer", (at,))
        if replicated and schedule.replicates_small:
            # DeepSpeed steps what it replicates in shards, and gathers it again.
            nbytes = float(workload.element_bytes * replicated)
            if schedule.shards == "node" or hardware.nodes == 1:
                traffic = collectives.intra_node(nbytes, hardware.ranks_per_node)
            else:
                traffic = collectives.flat(nbytes, *hardware.shape)
            tasks.exchange("gather what stays whole", COMPUTE, traffic, "optimizer", (at,))

    def _round(self) -> None:
        """Append a step's share of a round's mean: all wait for it, or it arrives meanwhile."""
        tasks, workload, average = self.tasks, self._workload, self._exchanges.average()
        hardware, schedule, stepped = self._hardware, self._schedule, len(tasks.tasks) - 1
        # Fragments cross in this share of a round's steps, and begin when so much of one is left.
        share = min(1.0, workload.fragments * workload.overlap / workload.interval)
        begins: tuple[int, ...] = (stepped,) if schedule.averages == "waited" else ()
        if schedule.averages == "streamed" and share < 1:
            computed = list(accumulate(task.demands.get("compute", 0.0) for task in tasks.tasks))
            before = (1 - share) * computed[-1]
            begins = (next(at for at, sum_ in enumerate(computed) if sum_ >= before),)
        arrived = tasks.exchange("average", "average", average, "reduce", begins)
        if workload.outer_on == "device":
            sharers = schedule.sharers(*hardware.shape)
            seconds = _ROUND_BYTES * workload.trained / sharers / _rate(hardware)
            begin = stepped if schedule.averages == "late" else arrived
            tasks.compute("outer update", seconds / workload.interval, (begin,))

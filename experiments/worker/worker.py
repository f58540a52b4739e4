"""The worker, on every rank of a cell: build, train, measure."""

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from baselines import strategy as strategies
from baselines.links import transmitted_bytes
from baselines.strategy import CacheUse, Job, Trainable
from experiments.clusters import start_barrier
from experiments.records.cell import Cell
from experiments.records.objective import CausalLM
from experiments.records.record import Cached, Measurement
from experiments.worker import (
    CHECKPOINT,
    convolutional,
    frozen,
    models,
    objectives,
    progress,
    workloads,
)
from experiments.worker.objectives.grpo import GRPO
from experiments.worker.objectives.objective import Allocated, Phases
from fcdp import Topology
from fcdp.checkpoint.loading import load_held
from fcdp.checkpoint.saving import save_held
from fcdp.durable import COMMIT

#: Variables that name a node's interfaces: to other nodes, and to nodes of other groups.
_INTERFACES = ("FCDP_INTERFACE", "FCDP_GROUP_INTERFACE")
#: Counts of each rank so far, as checkpoints hold them.
_SAVED = ("losses", "seconds", "counts", "held_out")


def main(cell_file: str, output_directory: str) -> None:
    """Train the cell on this rank; rank 0 writes ``measurement.json``.

    Expects torchrun's environment, and ``FCDP_INTERFACE``: the interface between nodes.
    """
    cell = Cell.model_validate_json(Path(cell_file).read_text(encoding="utf-8"))
    topology = Topology.from_env()
    try:
        training = _Training(cell, topology, Path(output_directory))
        measurement = training.measure()
        if cell.profile:
            training.profile_step()
        if topology.rank == 0:
            path = Path(output_directory) / "measurement.json"
            path.write_text(measurement.model_dump_json(indent=1), encoding="utf-8")
    finally:
        # Also after an error: the other ranks see the connection close and end too.
        dist.destroy_process_group()


class _Training:
    """One rank's training of a cell."""

    def __init__(self, cell: Cell, topology: Topology, output: Path) -> None:
        self.cell = cell
        self.topology = topology
        self.output = output
        self._progress = output / progress(topology.rank)
        # Only of iterations, and only before the end of warm-up: counting takes time.
        counts = not isinstance(cell.objective, CausalLM) and cell.warmup_steps > 0
        self.allocated = Allocated() if counts and self._device.type == "cpu" else None
        self.most_allocated: int | None = None
        #: Steps at which warm-up ends and, where memory is counted, its last step begins.
        self._warm_up = (*([cell.warmup_steps - 1] if self.allocated else []), cell.warmup_steps)
        model, blocks = models.build(cell)
        self.model = model
        models.check(model, cell, topology)
        self.workload = workloads.of(cell, model, topology)
        self.parameters = sum(map(frozen.weights, model.parameters()))
        self.trainable_parameters = sum(
            param.numel() for param in model.parameters() if param.requires_grad
        )
        build = strategies.load(cell.strategy)
        job = Job(
            topology=topology,
            blocks=blocks,
            dtype=getattr(torch, cell.dtype),
            learning_rate=cell.learning_rate,
            micro_batch=cell.micro_batch,
            accumulation=cell.accumulation,
            settings=cell.settings,
            optimizer=cell.optimizer,
            loss=self.workload.loss,
            measure=self.workload.measure,
        )
        self.objective = objectives.of(
            cell,
            model,
            blocks,
            topology.rank,
            shard=lambda frozen, its_blocks: build(frozen, replace(job, blocks=its_blocks)),
            apply=lambda function, batch: self.trainable.apply(function, batch),
        )
        if self.objective is not None:
            job = replace(job, loss=self.objective.loss)
        self.phases = Phases(lambda: self._egress()[0])
        self.trainable: Trainable = build(model, job)
        if cell.frozen_dtype == "float8":
            frozen.keep_scales(model)
        self.batches = self.workload.batches()
        #: Losses and seconds of all steps, warm-up included; counts of the measured ones.
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.counts: dict[str, Any] | None = None
        self.resumed_at: list[int] = []
        #: Losses of the held-out examples, by the number of steps before.
        self.held_out: dict[int, float] = {}

    def measure(self) -> Measurement:
        """Warm up, then train ``steps`` steps, counting what crosses in them.

        Training goes on from the cell's checkpoint, if there is one.
        """
        cell, trainable, save_every = self.cell, self.trainable, self.cell.checkpoint_every
        self._go_on()
        forget_peaks(self._device)
        if self._progress.exists():  # steps after the checkpoint are trained again
            lines = self._progress.read_text(encoding="utf-8").splitlines(keepends=True)
            self._progress.write_text("".join(lines[: len(self.losses)]), encoding="utf-8")
        dist.barrier()
        if self.topology.rank == 0:
            start_barrier.wait(self.output)
        dist.barrier()
        end = cell.warmup_steps + cell.steps
        while (done := len(self.losses)) < end:
            # Steps after which the next checkpoint and the next evaluation are due; 0: never.
            save_at = save_every and (done // save_every + 1) * save_every
            evaluate_every = cell.held_out and cell.held_out_every
            evaluate_at = evaluate_every and (done // evaluate_every + 1) * evaluate_every
            stop = min(step for step in (*self._warm_up, save_at, evaluate_at, end) if step > done)
            if self.allocated and done == self._warm_up[0]:
                self.allocated.mark()
            counts = self._stretch(stop - done)
            if stop > cell.warmup_steps:
                self.counts = _sum(self.counts, counts)
            else:
                trainable.take_metrics()
                self.phases.clear()
            if self.allocated and stop == cell.warmup_steps:
                self.most_allocated = self.allocated.most()
            if stop == evaluate_at and stop < end:
                self.held_out[stop] = self._held_out()["held_out_loss"]
            if stop == save_at and stop < end:
                self._save()
        # Before evaluating, which would else be counted and timed, and raise peaks.
        measurement = self._measurement()
        update = {**trainable.take_metrics(), **self._held_out()}
        if cell.held_out and cell.held_out_every:
            update["held_out_losses"] = {**self.held_out, end: update["held_out_loss"]}
        return measurement.model_copy(update=update)

    def _stretch(self, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps, and return by how much each counter has grown."""
        trainable = self.trainable
        trainable.take_ledger()
        trainable.take_phases()
        before = self._egress()
        self._train(steps)
        sent = [now - then for now, then in zip(self._egress(), before, strict=True)]
        cache = trainable.cache
        return {
            "sent": dict(enumerate(sent)),  # by this node: in all, and to other groups
            "gathers": cache and {"hits": cache.hits, "misses": cache.misses},
            "phases": trainable.take_phases(),
            "ledger": trainable.take_ledger(),
        }

    def _save(self) -> None:
        """Write a checkpoint: also what each rank has counted, and its random numbers' state."""
        mine = {name: getattr(self, name) for name in _SAVED}
        mine["random"] = [source.get_rng_state() for source in self._random]
        ranks: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(ranks, mine)
        extra = {"ranks": ranks, "resumed_at": self.resumed_at}
        save_held(self.trainable.held(), self.output / CHECKPOINT, extra=extra)

    def _go_on(self) -> None:
        """Load the last checkpoint, if rank 0 sees one."""
        exists: list[Any] = [(self.output / CHECKPOINT / COMMIT).exists()]
        dist.broadcast_object_list(exists)
        if not exists[0]:
            return
        saved = load_held(self.trainable.held(), self.output / CHECKPOINT)
        mine = saved["ranks"][self.topology.rank]
        for name in _SAVED:
            setattr(self, name, mine[name])
        self.resumed_at = [*saved["resumed_at"], len(self.losses)]
        for source, state in zip(self._random, mine["random"], strict=True):
            source.set_rng_state(state)
        for _ in range(len(self.losses) * self.cell.accumulation):
            next(self.batches)

    def profile_step(self) -> None:
        """Train one more step under the profiler, which is no part of the measurement.

        Each rank writes ``profile/rank<r>.json.gz`` on its own node, for Perfetto or
        chrome://tracing, and rank 0 ``communication.md``: calls and time by name, bytes by link.
        """
        folder = self.output / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        batches = self._batches()
        self.trainable.take_ledger()
        before = self._egress()[0]
        with profile(activities=activities) as profiler:
            self._step(batches).item()
        sent = self._egress()[0] - before
        profiler.export_chrome_trace(str(folder / f"rank{self.topology.rank}.json.gz"))
        ranks: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(ranks, _exchanges(profiler))
        if self.topology.rank == 0:
            ledger = self.trainable.take_ledger() or {}
            (folder / SUMMARY).write_text(_summary(ranks, sent, ledger), encoding="utf-8")

    def _held_out(self) -> dict[str, float]:
        """Means by metric over the held-out examples, all of which every rank has."""
        convolutional.average_statistics(self.model)
        totals, count = [0.0] * len(self.workload.metrics), 0
        for batch in self.workload.held_out():
            means = self.trainable.evaluate(batch.to(self._device)).reshape(-1).tolist()
            totals = [a + b * len(batch) for a, b in zip(totals, means, strict=True)]
            count += len(batch)
        if not count:
            return {}
        return {
            name: total / count for name, total in zip(self.workload.metrics, totals, strict=True)
        }

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            batches = self._batches()
            begin = time.perf_counter()
            # Reading the loss ends the step on an accelerator too.
            self.losses.append(self._step(batches).item())
            self.seconds.append(time.perf_counter() - begin)
            line = {
                "step": len(self.losses),
                "of": self.cell.warmup_steps + self.cell.steps,
                "loss": self.losses[-1],
                "seconds": self.seconds[-1],
                "at": time.time(),
            }
            if self.output.is_dir():  # which other nodes than the first may not see
                with self._progress.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    def _step(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.objective is None:
            return self.trainable.step(batches)
        self.phases.begin()
        return objectives.iterate(self.objective, self.trainable, batches, self.phases.end)

    def _batches(self) -> list[torch.Tensor]:
        return [batch.to(self._device) for batch in islice(self.batches, self.cell.accumulation)]

    def _egress(self) -> tuple[int, ...]:
        """Bytes that this node has sent so far, read while no rank is sending.

        In all, and to other groups of nodes where there are several.
        """
        self.trainable.settle()
        dist.barrier()
        links = [transmitted_bytes(os.environ[name]) for name in _INTERFACES if name in os.environ]
        return sum(links), *links[1:]

    @property
    def _device(self) -> torch.device:
        return torch.device(self.topology.mesh.device_type)

    @property
    def _random(self) -> list[Any]:
        """Modules of PyTorch that have a generator of random numbers: dropout draws from it."""
        on_cpu = self._device.type == "cpu"
        return [torch] if on_cpu else [torch, torch.get_device_module(self._device)]

    def _measurement(self) -> Measurement:
        cell, trainable, counts = self.cell, self.trainable, self.counts
        assert counts is not None, "a cell has a step or more"
        on_accelerator = self._device.type != "cpu"
        mine = {
            "seconds": self.seconds[cell.warmup_steps :],
            "losses": self.losses,
            "counts": counts,
            "cache": trainable.cache,
            "by_phase": self.phases.per_step(cell.steps),
            "rewards": self.objective.rewards if self.objective else (),
            "publications": self.objective.publications if isinstance(self.objective, GRPO) else (),
            "allocated": self.most_allocated,
            "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device": torch.accelerator.max_memory_allocated() if on_accelerator else 0,
        }
        ranks: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(ranks, mine)
        by_rank: list[dict[str, Any]] = [rank["counts"] for rank in ranks]
        busiest, *to_groups = max([*rank["sent"].values()] for rank in by_rank)
        return Measurement(
            engine=trainable.engine,
            engine_version=trainable.engine_version,
            policy=trainable.policy,
            parameters=self.parameters,
            trainable_parameters=self.trainable_parameters,
            step_seconds=[max(step) for step in zip(*(r["seconds"] for r in ranks), strict=True)],
            losses=_by_step(ranks, "losses"),
            inter_node_bytes_per_step=busiest / cell.steps,
            inter_group_bytes_per_step=to_groups[0] / cell.steps if to_groups else None,
            # An iteration's depends on how often a strategy gathers for the same parameters.
            inter_node_bytes_closed_form=None if self.objective else trainable.closed_form_bytes,
            ledger_bytes_per_step=counts["ledger"]
            and {link: _mean([phases], cell.steps) for link, phases in counts["ledger"].items()},
            reduce_dtype=trainable.reduce_dtype,
            peak_host_bytes=max(r["host"] for r in ranks),
            host_cache_bytes=trainable.host_cache_bytes,
            steps_per_round=trainable.interval,
            cache=_cached([r["cache"] for r in ranks], [r["gathers"] for r in by_rank], cell.steps),
            phase_seconds=counts["phases"]
            and _mean([r["phases"] or {} for r in by_rank], cell.steps),
            resumed_at=self.resumed_at,
            peak_device_bytes=max(r["device"] for r in ranks) or None,
            **_of_iterations(ranks, cell.warmup_steps),
        )


def forget_peaks(device: torch.device) -> None:
    """Count peaks of memory from now on: building takes a whole model on every rank."""
    with suppress(OSError):  # where /proc cannot be written to
        Path("/proc/self/clear_refs").write_text("5")
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def _of_iterations(ranks: Sequence[Mapping[str, Any]], warmup_steps: int) -> dict[str, Any]:
    """Metrics of iterations, by field of a measurement.

    They are the busiest node's bytes and the slowest rank's seconds of each phase, the most memory,
    and means of rewards and of a rollout's publications, which are alike on all ranks.
    """
    phases = ranks[0]["by_phase"]
    metrics: dict[str, Any] = {name: max(r["by_phase"][name] for r in ranks) for name in phases}
    if publications := ranks[0]["publications"][warmup_steps:]:
        metrics |= _mean(publications, 1)
    if ranks[0]["allocated"] is not None:
        metrics["iteration_device_bytes"] = max(r["allocated"] for r in ranks)
    if rewards := _by_step(ranks, "rewards"):
        measured = rewards[warmup_steps:]
        metrics |= {"rewards": rewards, "reward": sum(measured) / len(measured)}
    return metrics


def _by_step(ranks: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The ranks' mean at each step, or iteration."""
    return [sum(each) / len(each) for each in zip(*(r[name] for r in ranks), strict=True)]


def _sum(a: Any, b: Any) -> Any:
    """Add numbers, or mappings key by key; a key that only one mapping has keeps its value."""
    if a is None or b is None:
        return b if a is None else a
    if not isinstance(a, Mapping):
        return a + b
    return {name: _sum(a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])}


def _cached(
    ranks: Sequence[CacheUse | None], gathers: Sequence[Mapping[str, float]], steps: int
) -> Cached | None:
    """Use of the ranks' caches: what they hold now, and what they served in these steps."""
    held = [rank for rank in ranks if rank is not None]
    if not held:
        return None
    served = _mean(gathers, steps)
    return Cached(
        hits_per_step=served["hits"],
        misses_per_step=served["misses"],
        entries=_mean([rank.entries for rank in held], 1),
        entry_bytes={
            tier: max(rank.entry_bytes.get(tier, 0) for rank in held)
            for tier in {tier: None for rank in held for tier in rank.entry_bytes}
        },
        device_bytes=max(rank.device_bytes for rank in held),
        host_bytes=max(rank.host_bytes for rank in held),
    )


def _mean(ranks: Sequence[Mapping[str, float]], steps: int) -> dict[str, float]:
    """The mean over ranks and steps of each key's value, 0 where a rank does not have it."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: sum(r.get(name, 0) for r in ranks) / len(ranks) / steps for name in names}


#: Folder of the profile in the cell's directory, and its summary.
FOLDER = "profile"
SUMMARY = "communication.md"
#: Names of exchanges: in the library, in ``torch.distributed``, in its backends.
_EXCHANGES = ("fcdp::", "c10d::", "gloo:", "nccl:", "record_param_comms")


#: Calls and microseconds of one rank, by name.
_Exchanges = tuple[Counter[str], Counter[str]]


def _exchanges(profiler: profile) -> _Exchanges:
    """Exchanges by name, without the unit at the end of the library's own names."""
    calls, microseconds = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.name.startswith(_EXCHANGES):
            name = event.name.split()[0]
            calls[name] += 1
            microseconds[name] += event.cpu_time_total
    return calls, microseconds


def _summary(ranks: list[_Exchanges], sent: int, ledger: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        "# Communication of one step",
        "",
        "Time on the host from start to end of each range, which for what runs in the background "
        "is the time to start it. The mean over ranks, and the most of any.",
        "",
        "| Range | Calls per rank | ms | ms, at most |",
        "|---|--:|--:|--:|",
    ]
    for name in sorted({name for calls, _ in ranks for name in calls}):
        often = mean(calls[name] for calls, _ in ranks)
        times = [microseconds[name] / 1e3 for _, microseconds in ranks]
        lines.append(f"| {name} | {often:g} | {mean(times):.3f} | {max(times):.3f} |")
    lines += ["", f"Node 0 sent {sent / 1e6:.3f} MB to other nodes, by the kernel's counters."]
    if ledger:
        lines += ["", "| Link, of one node | Phase | MB |", "|---|---|--:|"]
        lines += [
            f"| {link.replace('_', ' ')} | {phase} | {count / 1e6:.3f} |"
            for link, phases in ledger.items()
            for phase, count in phases.items()
        ]
    return "\n".join(lines) + "\n"

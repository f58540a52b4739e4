"""This repository's library, with gathered parameters cached in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn as nn

import fcdp
from baselines import encoding
from baselines.pytorch.fsdp2 import FSDP2, mixed_precision, offload_policy
from baselines.settings import CacheSettings
from baselines.strategy import CacheUse, Job, crossing_bytes, gathered_size
from fcdp.checkpoint.held import Held
from fcdp.engine import engine_of
from fcdp.unit import Unit, entry_size


def build(model: nn.Module, job: Job) -> FCDP:
    """Shard every block and the root, frozen and trainable parameters apart, and cache them."""
    settings = settings_of(job)
    schedule = job.schedule.exchanging(settings.exchanges, settings.partial_gradients)
    job = replace(job, schedule=schedule)
    fcdp.shard(
        model,
        job.topology,
        units=job.blocks,
        policy=settings.policy,
        mp_policy=mixed_precision(job.dtype),
        offload_policy=offload_policy(job),
        comm=fcdp.CommOptions(
            gather_codec=encoding.gather(settings.gather_codec),
            reduce_codec=encoding.reduction(settings.reduce_codec),
            error_feedback=settings.error_feedback,
            exchanges="hierarchical" if schedule.hierarchical else "flat",
            partial_gradients=(
                schedule.partial_gradients if schedule.accumulates_without_sync else "each"
            ),
        ),
    )
    return FCDP(model, job, _least_bytes(model, job))


def settings_of(job: Job) -> CacheSettings:
    """The job's settings, which ``baselines.strategy.load`` has completed."""
    assert isinstance(job.settings, CacheSettings), f"{job.settings!r}: must be FCDP's"
    return job.settings


def _least_bytes(model: nn.Module, job: Job) -> float:
    """Least bytes per step that this schedule must send from one node.

    A cached unit crosses nodes once per step if it is trained, and if it is frozen not at all, or
    once where no entry outlives a step. One that no tier has room for crosses for each gather of
    each micro-batch. Gradients cross once, or with each micro-batch if they are not deferred.
    Differences can be nothing at all where a cache holds what they are from, and so nearly can
    gradients that are coded exactly.
    Call it after sharding.
    """
    engine, settings = engine_of(model), settings_of(job)
    gather_codec, reduce_codec = (
        encoding.gather(settings.gather_codec),
        encoding.reduction(settings.reduce_codec),
    )
    reductions = 1 if job.schedule.accumulates_without_sync else job.accumulation
    count = 0.0
    for unit in engine.entries:
        gathers = 1 + unit.reuses - (not unit.trainable)
        cached = bool(engine.cache.placement.preferences[unit])
        crossings = unit.trainable if cached else gathers * job.accumulation
        if cached and not unit.trainable and job.schedule.cached_for == "step":
            count += _crossing_bytes(unit, job, None)
        if isinstance(gather_codec, fcdp.Delta):
            count += (not cached) * crossings * _crossing_bytes(unit, job, None)
        else:
            count += crossings * _crossing_bytes(unit, job, gather_codec)
        if not isinstance(reduce_codec, fcdp.Exact):
            count += reductions * unit.trainable * _crossing_bytes(unit, job, reduce_codec)
    return count


def _crossing_bytes(unit: Unit, job: Job, codec: fcdp.Codec | None) -> float:
    """Bytes that one node sends when the unit crosses once. Codecs encode shards with padding."""
    ranks = job.topology.world_size
    moved = sum(
        ranks * unit.packed[at] if at in unit.packed else param.numel() * gathered_size(param, job)
        for at, param in enumerate(unit.params)
    )
    if not job.schedule.hierarchical:  # all but one rank's part pass over the ring's edge
        return (1 - 1 / ranks) * moved
    if codec is None:
        return crossing_bytes(moved, job, 1)
    sent = (job.topology.nodes - 1) * codec.encoded_bytes(unit.shard_numel)
    return job.topology.ranks_per_node * sent


def _describe(settings: CacheSettings) -> str:
    """The cache policy, and what else differs from the paper's FCDP."""
    words = [settings.policy]
    if settings.gather_codec != "none":
        words.append(f"gather {settings.gather_codec}")
    if settings.reduce_codec != "none":
        words.append(
            f"reduce {settings.reduce_codec}{' with error feedback' * settings.error_feedback}"
        )
    if settings.exchanges != "hierarchical":
        words.append(f"{settings.exchanges} exchanges")
    if settings.partial_gradients != "device":
        words.append(f"partial gradients {settings.partial_gradients}")
    return ", ".join(words)


def cache_use(models: Sequence[nn.Module]) -> CacheUse:
    """Use of one rank's caches, of the models that it has."""
    engines, ledgers = [*map(engine_of, models)], [*map(fcdp.ledger, models)]
    entries: Counter[str] = Counter()
    entry_bytes: Counter[str] = Counter()
    for engine in engines:
        for unit, entry in engine.entries.items():
            if entry.tier is not None:
                entries[entry.tier] += 1
                entry_bytes[entry.tier] += entry_size(unit)
    return CacheUse(
        hits=sum(ledger.hits for ledger in ledgers),
        misses=sum(ledger.misses for ledger in ledgers),
        entries=dict(entries),
        entry_bytes=dict(entry_bytes),
        device_bytes=sum(ledger.device_cache_bytes for ledger in ledgers),
        host_bytes=sum(ledger.host_cache_bytes for ledger in ledgers),
    )


def node_bytes(ledger: fcdp.Ledger, topology: fcdp.Topology) -> dict[str, dict[str, float]]:
    """Take one node's bytes: by symmetry each of its ranks moves as much as this one."""
    counts = {
        link: {phase: float(topology.ranks_per_node * count) for phase, count in phases.items()}
        for link, phases in ledger.snapshot().items()
    }
    ledger.reset()
    return counts


class FCDP(FSDP2):
    """FSDP2's loop with gradient accumulation by the library."""

    def __init__(self, model: nn.Module, job: Job, closed_form_bytes: float) -> None:
        super().__init__(model, job, closed_form_bytes)
        self.policy = _describe(settings_of(job))

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        # Nobody writes between micro-batches: the ranks agree once per step.
        with fcdp.unchanged(self.model):
            total = super().step(micro_batches)
        if self.job.schedule.cached_for == "step":
            # The paper's FCDP-Sched alone, which does not tell frozen from trained parameters: all
            # count as written by the optimizer.
            fcdp.invalidate(self.model)
        return total

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        with fcdp.accumulate(self.model, last=last):
            return super().backward(batch, last=last)

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        with fcdp.unchanged(self.model):
            yield

    def held(self) -> Held:
        return Held.whole(self.model, self.optimizer)

    def take_ledger(self) -> dict[str, dict[str, float]]:
        return node_bytes(fcdp.ledger(self.model), self.job.topology)

    @property
    def reduce_dtype(self) -> str | None:
        return ", ".join(sorted(fcdp.ledger(self.model).reduce_dtypes)) or None

    @property
    def cache(self) -> CacheUse:
        return cache_use([self.model])

"""The study of memory: its cases, how each is measured, and the records as tables."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, get_args

from baselines import registry
from simulation import checks
from simulation.files import now
from simulation.imitated.records import Case, MemoryRecord, MemoryUse, Peak, State
from simulation.models import PAPER_MODELS, SEQUENCE_LENGTH
from simulation.transformer import ModelSpec, Tuning

if TYPE_CHECKING:
    from simulation.imitated.rank import Build

#: The micro-batch of the paper's first protocol: always run.
PAPER_MICRO_BATCH = 8
#: Points up to which lines are tried; then bisection, which is faster where lines bend often.
_LINES = 7
#: The paper's cluster: 4 nodes of 8 A40 with 48 GB.
NODES, RANKS_PER_NODE, DEVICE_BYTES = 4, 8, 48 * 10**9
#: Our choice, for what PyTorch's allocator does not see (CUDA's context, NCCL's buffers: 1 to 2 GB)
#: and for what it cannot use (fragments, blocks that a stream still holds).
RESERVE_BYTES = 4 * 10**9
#: Tokens per sequence: what is assumed of the paper, and longer.
SEQUENCE_LENGTHS = (SEQUENCE_LENGTH, 2 * SEQUENCE_LENGTH, 4 * SEQUENCE_LENGTH)
#: The paper's LoRA.
LORA_RANK = 8

_HOST = ("host",)
#: Strategies with their policies, those whose memory differs first; fcdp with the paper's policies.
STRATEGIES = (
    *product(("fsdp2", "fcdp", "hpz", "fsdp2-hsdp", "zeropp"), _HOST),
    ("fcdp", "threshold(0.8)"),
    *product(("zero3", "fsdp2-offload", "fsdp2-reshard", "qwz", "qgz"), _HOST),
    *product(("ddp", "deepspeed-zero3", "deepspeed-hpz"), _HOST),
)

#: Why an engine's step does not run on the imitated accelerator: what was raised when tried.
_REASONS = {
    "ddp": "not run: DDP's reducer is C++ that reads tensors' contents, and fake ones have none",
    "deepspeed": "not run: DeepSpeed chooses its device itself, here the CPU, and moves parameters "
    "there by assigning param.data, which PyTorch refuses between these tensors (incompatible "
    "tensor type)",
}
HEAD = ("strategy", "full", "full, checkpointing", "LoRA", "LoRA, checkpointing", "host GB a node")
_KINDS = (("full", False), ("full", True), ("lora", False), ("lora", True))


def largest_fitting(peak: Callable[[int], int], usable: int, about_one: int) -> int:
    """The largest micro-batch m with ``peak(m) <= usable`` bytes; 0 if there is none.

    ``peak`` must not decrease. It is called for m, m + 1 and few others: it grows piece by piece on
    straight lines, so the next guess is where the line through two points meets the limit.
    ``about_one`` is roughly ``peak(1)``: it decides where to look first, and nothing else.
    """
    known: dict[int, int] = {1: about_one}
    fits, exceeds = 0, None
    guess = PAPER_MICRO_BATCH
    while exceeds != fits + 1:
        known[guess] = peak(guess)
        if known[guess] <= usable:
            fits = guess
        else:
            exceeds = guess
        guess = _guess(known, usable, fits, exceeds)
    return fits


def _guess(known: Mapping[int, int], usable: int, fits: int, exceeds: int | None) -> int:
    """A guess between what fits and what exceeds; at most 16 times what fits, if nothing does."""
    if exceeds is not None and len(known) > _LINES:
        return (fits + exceeds) // 2
    most = 16 * fits if exceeds is None else exceeds - 1
    x, x_next = sorted(known)[-2:] if exceeds is None else (fits or 1, exceeds)
    y, y_next = known[x], known[x_next]
    meets = most if y_next <= y else x + (usable - y) * (x_next - x) // (y_next - y)
    return max(fits + 1, min(meets, most))


def cases(
    models: Sequence[ModelSpec] = tuple(PAPER_MODELS.values()),
    strategies: Sequence[str] | None = None,
    lengths: Sequence[int] = SEQUENCE_LENGTHS,
) -> list[Case]:
    """The cases: every length × strategy × model × {full, LoRA} × checkpointing {off, on}.

    Raises ``ValueError`` for a strategy that is not among ``STRATEGIES``, and for a length that is
    not among ``SEQUENCE_LENGTHS``.
    """
    for length in lengths:
        checks.one_of("length", length, SEQUENCE_LENGTHS)
    for name in strategies or ():
        checks.one_of("strategy", name, sorted({known for known, _ in STRATEGIES}))
    chosen = [pair for pair in STRATEGIES if strategies is None or pair[0] in strategies]
    return [
        Case(
            strategy=strategy,
            policy=policy,
            model=model,
            tuning=tuning,
            checkpointing=checkpointing,
            nodes=NODES,
            ranks_per_node=RANKS_PER_NODE,
            sequence_length=length,
            lora_rank=LORA_RANK,
            device_bytes=DEVICE_BYTES,
            reserve_bytes=RESERVE_BYTES,
        )
        for length, (strategy, policy), checkpointing, tuning, model in product(
            lengths, chosen, (False, True), get_args(Tuning), models
        )
    ]


def settle(
    pending: Iterable[Case],
    processes: int,
    build: Build,
    *,
    commit: str | None,
    versions: Mapping[str, str],
) -> Iterator[MemoryRecord]:
    """Settle the cases with so many ``processes``; yields records as they are finished.

    ``build`` is called there, so that it must be a function of a module; ``commit`` and
    ``versions`` are those that the records name.
    """
    origin = {"commit": commit, "versions": dict(versions)}
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning that fake groups do nothing
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            futures = [pool.submit(_settle, case, build, origin) for case in pending]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _settle(case: Case, build: Build, origin: dict[str, Any]) -> MemoryRecord:
    started_at, started = now(), time.monotonic()
    state: State = "skipped"
    finding = None
    error = _REASONS.get(registry.find(case.strategy).engine)
    if error is None:
        try:
            finding = find(case, build)
            state = "ok" if finding.largest_micro_batch else "oom"
        except Exception as failure:
            state, error = "failed", f"{type(failure).__name__}: {failure}"
    elif (least := _least_bytes(case, build)) > case.usable_bytes:
        state = "oom"
        error += f"; but it needs more than {least / 1e9:.0f} GB a rank"
    return MemoryRecord(
        case=case,
        state=state,
        error=error,
        finding=finding,
        started_at=started_at,
        seconds=time.monotonic() - started,
        **origin,
    )


def _least_bytes(case: Case, build: Build) -> int:
    """Least bytes that DDP keeps: fp32 parameters; of trained ones gradients and two moments."""
    import torch

    if case.strategy != "ddp":
        return 0
    with torch.device("meta"):
        model, _ = build(case)
    return sum(param.numel() * (16 if param.requires_grad else 4) for param in model.parameters())


def find(case: Case, build: Build) -> MemoryUse:
    """Count the memory of the case's steps, run in this process on the imitated accelerator."""
    # These import torch, for which commands that measure nothing must not wait.
    from simulation.imitated.accelerator import NAME, imitated
    from simulation.imitated.rank import Rank, imitated_host, world

    with (
        imitated(case.device_bytes) as allocations,
        world(case.nodes * case.ranks_per_node, NAME),
        imitated_host(),
    ):
        rank = Rank(case, NAME, build)
        before = allocations.current[NAME]
        allocations.reset_peak()
        rank.step(1)  # makes the optimizer's states, which do not exist yet at its peak
        resting = allocations.current[NAME]
        about_one = allocations.peak[NAME] + resting - before
        peaks: list[Peak] = []

        def peak(micro_batch: int) -> int:
            allocations.reset_peak()
            rank.step(micro_batch)
            device, host = allocations.peak[NAME], allocations.peak["cpu"]
            peaks.append(Peak(micro_batch=micro_batch, device_bytes=device, host_bytes=host))
            return device

        largest = largest_fitting(peak, case.usable_bytes, about_one)
    cache = rank.trainable.host_cache_bytes
    return MemoryUse(
        parameters=rank.parameters,
        trainable_parameters=rank.trained,
        resting_device_bytes=resting,
        peaks=peaks,
        largest_micro_batch=largest,
        host_cache_bytes_per_node=None if cache is None else cache * case.ranks_per_node,
    )


def tables(records: Iterable[MemoryRecord]) -> dict[str, list[tuple[str, ...]]]:
    """One table per length and model, by its title; its columns are ``HEAD``.

    It has one row per strategy: the largest micro-batch, and a peak.
    """
    groups: dict[tuple[int, str], list[MemoryRecord]] = {}
    for record in records:
        case = record.case
        groups.setdefault((case.sequence_length, case.model.name), []).append(record)
    return {
        f"{name}, {length:,} tokens per sequence": _rows(groups[length, name])
        for length, name in sorted(groups)
    }


def _rows(records: Sequence[MemoryRecord]) -> list[tuple[str, ...]]:
    by_label: dict[str, dict[tuple[str, bool], MemoryRecord]] = {}
    for record in records:
        kinds = by_label.setdefault(record.case.label, {})
        kinds[record.case.tuning, record.case.checkpointing] = record
    return [
        (label, *(_figure(kinds.get(kind)) for kind in _KINDS), _host(kinds.values()))
        for label, kinds in by_label.items()
    ]


def _figure(record: MemoryRecord | None) -> str:
    if record is None:
        return ""
    if record.finding is None:
        return record.state
    at_paper = next(
        peak.device_bytes for peak in record.finding.peaks if peak.micro_batch == PAPER_MICRO_BATCH
    )
    return f"{record.finding.largest_micro_batch} ({at_paper / 1e9:.1f} GB)"


def _host(records: Iterable[MemoryRecord]) -> str:
    """Host memory of a node in GB, the most over tunings and checkpointing; a dash without."""
    sizes = [
        record.case.ranks_per_node * peak.host_bytes
        for record in records
        if record.finding is not None
        for peak in record.finding.peaks
    ]
    return f"{max(sizes) / 1e9:.1f}" if sizes else "–"

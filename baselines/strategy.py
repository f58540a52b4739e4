"""A strategy's interface: it turns a model into something that trains on this cluster."""

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from baselines import optimizers, registry
from baselines.description import Strategy
from baselines.schedule import Schedule
from baselines.settings import CacheSettings, EncodedSettings, PaperSettings, Settings
from fcdp import Topology
from fcdp.checkpoint.held import Held
from fcdp.extensions import is_extended


def causal_loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy of a ``transformers`` model on int64 (sequences, tokens + 1)."""
    logits: torch.Tensor = model(input_ids=sequences[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), sequences[:, 1:].flatten())


#: Mean loss of a model on a batch, a scalar; calls the model once. A batch is one tensor, whose
#: form the loss alone knows: int64 (sequences, tokens + 1) of text, floats of images.
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
#: Means over a batch of what is measured on held-out data, a scalar or 1-D; calls the model once.
Measure = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A cell's training as every strategy is given it, on one rank."""

    topology: Topology
    #: Modules to gather one at a time: the transformer blocks.
    blocks: Sequence[nn.Module]
    #: Gather, compute and reduce dtype. With bfloat16, master weights stay float32.
    dtype: torch.dtype
    learning_rate: float
    #: Examples per rank and micro-batch, and micro-batches between two optimizer steps.
    micro_batch: int
    accumulation: int
    #: The strategy's settings, of the type that its description names.
    settings: Settings = field(default_factory=Settings)
    #: The strategy's schedule, which ``load`` gives, and builders follow.
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: optimizers.AnyOptimizer = field(default_factory=optimizers.AdamW)
    loss: Loss = causal_loss
    #: Name of what ``evaluate`` gives; ``None``: the loss.
    measure: Measure | None = None


@dataclass(frozen=True)
class CacheUse:
    """Use of one rank's cache: gathers that it served, and entries that it holds."""

    #: Gathers since the last ``take_ledger``: served from the cache, and across nodes.
    hits: int
    misses: int
    #: Entries and their bytes, by the tier that they are in.
    entries: dict[str, int]
    entry_bytes: dict[str, int]
    #: Memory that is taken for entries: of the device, and of the host, page-locked on CUDA.
    device_bytes: int
    host_bytes: int


class Trainable:
    """A model under one strategy, on this rank; strategies override what they do differently."""

    #: The engine that its description names, as ``load`` says.
    engine: str
    engine_version = torch.__version__
    #: Cache policy, for strategies that have one.
    policy: str | None = None
    #: Optimizer steps from one exchange between workers to the next.
    interval = 1

    def __init__(self, model: nn.Module, job: Job, closed_form_bytes: float) -> None:
        """``closed_form_bytes``: the least that this schedule must send per step from one node."""
        self.model = model
        self.job = job
        self.closed_form_bytes = closed_form_bytes
        #: Seconds that this rank has spent in each phase since the last ``take_phases``.
        self._seconds: dict[str, float] = defaultdict(float)

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One optimizer step; each micro-batch is what the job's loss takes.

        Returns the mean loss of this rank's micro-batches, a scalar without gradient.
        """
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Return what the job measures, by default the mean loss; nothing is trained.

        All ranks call it together, each with as many examples as it likes.
        """
        self.model.eval()
        with self.casting():
            measured = self.apply(self.job.measure or self.job.loss, batch)
        self.model.train()
        return measured

    def apply(self, function: Measure, batch: torch.Tensor) -> torch.Tensor:
        """Return what ``function`` makes of the model and of this rank's batch.

        For forwards that nothing is trained on: without gradients. All ranks call it together.
        """
        return function(self.model, batch)

    def casting(self) -> AbstractContextManager[object]:
        """Context of forwards in ``job.dtype``, to which FSDP2's mixed precision casts anyway."""
        return nullcontext()

    def without_gradients(self) -> AbstractContextManager[object]:
        """Context of an iteration's forwards that come before its first step."""
        return nullcontext()

    def held(self) -> Held:
        """Parts of the model and its optimizer that this rank has between steps, for checkpoints.

        For strategies whose descriptions say ``is_saved``.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for what is still being sent after the last step, before bytes are counted.

        All ranks call it together, before they wait for one another in another way.
        """

    def take_metrics(self) -> Mapping[str, Any]:
        """Metrics of the steps since the last call, by field of a measurement.

        All ranks call it together.
        """
        return {}

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        """Bytes that one node has moved since the last call, by link and phase.

        ``None`` for an engine without a ledger.
        """
        return None

    def take_phases(self) -> dict[str, float] | None:
        """Seconds of this rank since the last call: forward, backward, optimizer.

        ``None`` on an accelerator: a call returns there when its work is queued, not done.
        """
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken if self.job.topology.mesh.device_type == "cpu" else None

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count the block's time as this phase's."""
        begin = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begin

    @property
    def cache(self) -> CacheUse | None:
        """Use of this rank's cache since the last ``take_ledger``."""
        return None

    @property
    def reduce_dtype(self) -> str | None:
        """The dtype that gradients are reduced in, of an engine that says it."""
        return None

    @property
    def host_cache_bytes(self) -> int | None:
        """Host memory that is taken for gathered parameters; ``None`` without any."""
        return None if self.cache is None else self.cache.host_bytes


#: Puts a model under a strategy.
Builder = Callable[[nn.Module, Job], Trainable]
#: Settings that are FCDP's, or those of them that a preset does not fix.
_LIBRARYS = (CacheSettings, EncodedSettings, PaperSettings)


def load(name: str) -> Builder:
    """The function that builds the strategy of this name.

    Raises ``ValueError`` for one that does not exist. Only its module, and so only its engine, is
    imported.
    """
    description = registry.find(name)
    module, function = description.builder
    build: Builder = getattr(importlib.import_module(module), function)

    @functools.wraps(build, updated=())
    def built(model: nn.Module, job: Job) -> Trainable:
        _refuse_others(job.settings, description)
        if description.cpu_only and (device := job.topology.mesh.device_type) != "cpu":
            raise ValueError(f"device = {device}: must be cpu, as {name} {description.cpu_only}")
        settings = job.settings
        if description.settings in _LIBRARYS:  # all of FCDP's: given, fixed, or defaults
            settings = CacheSettings(**(settings.model_dump() | description.fixes))
        schedule = description.schedule or Schedule()
        trainable = build(model, replace(job, settings=settings, schedule=schedule))
        trainable.engine = description.engine
        return trainable

    return built


def _refuse_others(settings: Settings, description: Strategy) -> None:
    """Raises ``ValueError`` for a setting that the strategy does not have, or fixes otherwise."""
    allowed = description.settings.model_fields
    for name, value in settings.model_dump(exclude_unset=True).items():
        fixed = description.fixes.get(name)
        if name not in allowed or (fixed is not None and value != "none"):
            has = "none" if fixed is None else f"its own, {fixed}"
            raise ValueError(
                f"{name} = {value!r}: {description.name} has {has}; allowed are "
                f"{', '.join(allowed) or 'no settings'}"
            )


def crossing_bytes(elements: float, job: Job, size: float | None = None) -> float:
    """Return the least bytes that one node sends when ``elements`` elements cross nodes once.

    A node sends (n−1) copies of its part. An element takes ``size`` bytes, or what
    ``job.dtype`` takes.
    """
    nodes = job.topology.nodes
    return (nodes - 1) / nodes * elements * (size or job.dtype.itemsize)


def zero3_bytes(
    model: nn.Module, job: Job, *, gathered: float | None = None, reduced: float | None = None
) -> float:
    """Least bytes per step that ZeRO-3's schedule must send from one node, however it is exchanged.

    Each micro-batch gathers every block in forward and in backward, what is outside of the blocks
    once, and reduces the gradients. ``gathered`` and ``reduced`` are bytes per element, by default
    those that a gather of each parameter moves, and of ``job.dtype``. Call it before sharding, and
    on all ranks: an extension of a gather may exchange what it scales by.
    """
    moved = sum(
        numel(module.parameters()) * gathered if gathered else gathered_bytes(module, job)
        for module in (model, *job.blocks)
    )
    gathers = crossing_bytes(moved, job, 1)
    reductions = crossing_bytes(trained_numel(model), job, reduced)
    return (gathers + reductions) * job.accumulation


@torch.no_grad()
def gathered_bytes(model: nn.Module, job: Job) -> int:
    """Bytes of all parameters of a whole model, as FSDP2's gathers move them."""
    total = 0
    for param in model.parameters():
        if is_extended(param):
            tensors, _ = param.fsdp_pre_all_gather(job.topology.mesh)  # type: ignore[attr-defined]
            total += sum(each.nbytes for each in tensors)
        else:
            total += param.numel() * gathered_size(param, job)
    return total


def gathered_size(param: torch.Tensor, job: Job) -> int:
    """Bytes per element in a gather of a parameter that no extension packs: it casts floats."""
    return (job.dtype if param.is_floating_point() else param.dtype).itemsize


def replicated_bytes(model: nn.Module, job: Job) -> float:
    """Least bytes per step that one node must send where every node holds all parameters.

    Gradients cross once per step, out and back as sums. Call it before sharding.
    """
    return 2 * crossing_bytes(trained_numel(model), job)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer steps, in the model's order."""
    return [param for param in model.parameters() if param.requires_grad]


def numel(params: Iterable[torch.Tensor]) -> int:
    return sum(param.numel() for param in params)


def trained_numel(model: nn.Module) -> int:
    """Elements of the parameters that the optimizer steps."""
    return numel(trainable_parameters(model))


def make_optimizer(params: Iterable[nn.Parameter], job: Job) -> torch.optim.Optimizer:
    """The optimizer that every strategy uses; a frozen model's has nothing to step."""
    return optimizers.make(job.optimizer, [*params] or [{"params": []}], job.learning_rate)

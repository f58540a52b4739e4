"""A model cut into a cycle's stages, as ``baselines.cyclic`` cuts it: sizes, memory, messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from baselines.cyclic.routes import Cycle, Kind, chosen, is_fresh, slots_per_step
from simulation.workload import FP32, Workload

_MOMENTS = 8
#: Messages in a rank's memory: two that are received, two that are sent.
_MESSAGES = 4


@dataclass(frozen=True)
class Stages:
    """The stages, input side first, each by its blocks and its numbers of parameters."""

    blocks: tuple[int, ...]
    #: All parameters of a stage, trained ones of these, and those that are in no block.
    parameters: tuple[int, ...]
    trained: tuple[int, ...]
    outside: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def sizes(self, *, twice: bool) -> Mapping[Kind, Sequence[int]]:
        """Elements of each stage's messages.

        With ``twice`` ranks free parameters, frozen ones too, between forward and backward; those
        outside of the blocks stay.
        """
        passed = [whole - out for whole, out in zip(self.parameters, self.outside, strict=True)]
        return {
            "forward": self.parameters if twice else self.trained,
            "backward": passed,
            "gradient": self.trained,
            "sum": self.trained,
        }


def stages_of(workload: Workload, ranks: int) -> Stages:
    """The stages of a cycle: as many as the micro-batches in it, unless fewer are chosen.

    Raises ``ValueError`` for more stages than blocks or micro-batches, and for several
    micro-batches per rank where each rank is one.
    """
    model, cycle = workload.model, workload.schedule.cycle
    if workload.schedule.passes_on and workload.accumulation != 1:
        raise ValueError(
            f"accumulation = {workload.accumulation}: allowed is 1, as each rank is one micro-batch"
        )
    if model.kinds:
        raise ValueError(f"model = {model.name!r}: its blocks differ; cycles are of equal blocks")
    most, called = ranks, "ranks"
    if cycle == "turns":
        most, called = workload.accumulation, "micro-batches per step (accumulation)"
    size = workload.block_parameters
    runs = chosen(workload.stages, [size] * model.layers, most, called)
    blocks = tuple(len(run) for run in runs)
    outside = [0] * len(runs)
    outside[0] += model.embedded_parameters
    outside[-1] += model.root_parameters - model.embedded_parameters
    numels = tuple(count * size + out for count, out in zip(blocks, outside, strict=True))
    adapters = tuple(count * workload.block_adapters for count in blocks)
    return Stages(blocks, numels, numels if workload.lora is None else adapters, tuple(outside))


def cycle_of(workload: Workload, stages: Stages, ranks: int) -> Cycle:
    """Who sends what to whom, where ranks pass stages on."""
    twice = workload.schedule.cycle == "zero"
    return Cycle(workload.rule, ranks, len(stages), twice)


class Held(NamedTuple):
    """Bytes of one rank, by what they are."""

    parameters: float
    gradients: float
    states: float
    #: Bytes that the optimizer takes beside them while it steps.
    step: float
    #: Outer state of workers that step apart.
    outer: float = 0.0
    #: Gradients that are applied a step late; a second version of parameters, or of a stage's.
    versions: float = 0.0
    #: Messages, which are in host memory.
    messages: float = 0.0
    #: Micro-batches whose activations are there at once.
    in_flight: float = 1.0


def held(workload: Workload, ranks: int) -> Held:
    """Memory of the busiest rank. Raises ``ValueError`` as ``stages_of``."""
    stages = stages_of(workload, ranks)
    frozen = 0.0 if workload.lora is None else min(FP32, workload.frozen_bytes)
    trained, largest = workload.trained, max(stages.trained)
    parameter_bytes = FP32 * trained + frozen * workload.frozen
    cycle = workload.schedule.cycle
    if cycle == "together":
        # Gradients of the stages that are a step old; the first rank's are most.
        old = [not is_fresh(workload.rule, 0, at, len(stages)) for at in range(len(stages))]
        late = FP32 * sum(compress(stages.trained, old))
        step = FP32 * trained + late
        return Held(parameter_bytes, FP32 * trained, _MOMENTS * trained, step, versions=late)
    if cycle == "turns":
        # Sums of a step's gradients begin when three stages of the last one's are left, or fewer.
        two_steps = 1 + max(0, len(stages) - 3) / len(stages)
        gradients = FP32 * (two_steps * trained + largest)
        return Held(
            parameter_bytes,
            gradients,
            _MOMENTS * trained,
            FP32 * largest,
            versions=FP32 * trained,
            in_flight=(len(stages) + 1) / 2,
        )
    own_stage = max(stages.parameters if cycle == "zero" else stages.trained)
    sent = max(max(numels) for numels in stages.sizes(twice=cycle == "zero").values())
    parameters, versions = parameter_bytes, float(FP32 * own_stage)
    if cycle == "zero":  # its own stage, what is outside of the blocks, and the stage in use
        share = parameter_bytes / workload.parameters
        parameters = share * (own_stage + sum(stages.outside))
        versions += share * own_stage
    return Held(
        parameters,
        2 * FP32 * largest,  # and the same end to end
        _MOMENTS * largest,
        FP32 * largest,
        versions=versions,
        messages=float(_MESSAGES * FP32 * sent),
    )


def sent(workload: Workload, ranks: int) -> list[float] | None:
    """Bytes that a rank sends in each slot, at most, forwards before backwards.

    ``None`` where ranks do not pass stages on. Raises ``ValueError`` as ``stages_of``.
    """
    if workload.served or not workload.schedule.passes_on:
        return None
    stages = stages_of(workload, ranks)
    cycle = cycle_of(workload, stages, ranks)
    sizes, slots = stages.sizes(twice=cycle.twice), 2 * cycle.stages
    by_rank = [[0.0] * slots for _ in range(ranks)]
    for message in cycle.messages():
        if message.source != message.target:
            forward = message.kind == "forward"
            slot = message.stage if forward else slots - 1 - message.stage
            by_rank[message.source][slot] += FP32 * sizes[message.kind][message.stage]
    return [max(of_slot) for of_slot in zip(*by_rank, strict=True)]


def activations(workload: Workload, ranks: int, nbytes: float) -> tuple[list[float], float] | None:
    """Bytes of activations in each slot, and of all micro-batches of a step at once.

    ``nbytes`` are those of a step's fullest moment, which all slots have. ``None`` where
    micro-batches do not take turns.
    """
    if workload.served or workload.schedule.cycle != "turns":
        return None
    of_micro_batch = nbytes / held(workload, ranks).in_flight
    count = workload.accumulation
    return [nbytes] * slots_per_step(count), count * of_micro_batch

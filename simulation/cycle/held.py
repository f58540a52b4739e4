"""What a rank keeps from step to step, in bytes; of a cycle, as ``baselines.cyclic`` has it."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.cycle.stages import stages_of
from simulation.workload import Workload

_FP32 = 4
_MOMENTS = 8
#: Messages that a rank has in hand: two that come, two that go.
_MESSAGES = 4
#: A stage's gradients, and the same end to end.
_GRADIENTS = 2 * _FP32


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, by what they are."""

    parameters: float
    gradients: float
    states: float
    #: What the optimizer takes beside them while it steps.
    step: float
    #: Of workers that step apart.
    outer: float = 0.0
    #: Gradients that are applied a step late; a second version of parameters, or of a stage's.
    versions: float = 0.0
    #: Messages, which are in host memory.
    messages: float = 0.0
    #: Micro-batches whose activations are there at once.
    in_flight: float = 1.0


def held(workload: Workload, ranks: int) -> Held:
    """What the busiest rank keeps. Raises ``ValueError`` as ``stages_of``."""
    stages = stages_of(workload, ranks)
    frozen = 0.0 if workload.lora is None else min(_FP32, workload.frozen_bytes)
    trained, largest = workload.trained, max(stages.trained)
    every = _FP32 * trained + frozen * workload.frozen
    cycle = workload.schedule.cycle
    if cycle == "together":
        late = _FP32 * stages.late(workload.rule, 0)  # the first rank's are most
        step = _FP32 * trained + late
        return Held(every, _FP32 * trained, _MOMENTS * trained, step, versions=late)
    if cycle == "turns":
        # Sums of a step's gradients begin when three stages of the last one's are left, or fewer.
        two_steps = 1 + max(0, len(stages) - 3) / len(stages)
        gradients = _FP32 * (two_steps * trained + largest)
        return Held(
            every,
            gradients,
            _MOMENTS * trained,
            _FP32 * largest,
            versions=_FP32 * trained,
            in_flight=(len(stages) + 1) / 2,
        )
    own = max(stages.parameters if cycle == "zero" else stages.trained)
    sent = max(max(numels) for numels in stages.sizes(twice=cycle == "zero").values())
    parameters, versions = every, float(_FP32 * own)
    if cycle == "zero":  # its own stage, what is outside of the blocks, and the stage in use
        share = every / workload.parameters
        parameters = share * (own + sum(stages.outside))
        versions += share * own
    return Held(
        parameters,
        _GRADIENTS * largest,
        _MOMENTS * largest,
        _FP32 * largest,
        versions=versions,
        messages=float(_MESSAGES * _FP32 * sent),
    )

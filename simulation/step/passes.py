"""Seconds of computation: what a block takes beside matrix products, and what a stage takes."""

from __future__ import annotations

from dataclasses import dataclass

from simulation import activations
from simulation.cycle import Stages
from simulation.hardware import Hardware
from simulation.step.optimizer import adam_seconds
from simulation.work import block_work, dequantised_bytes, head_work, recomputed_work
from simulation.workload import Workload


def overhead_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds beside matrix products, in one forward or one backward of a block."""
    overheads = hardware.overheads
    kept = workload.tokens * activations.block_bytes(workload) * hardware.ranks_sharing_device
    each = overheads.block_seconds.get(workload.engine, 0.0)
    return (each + overheads.activation_byte_seconds * kept) / 2


def call_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds of calls for a block in the optimizer's step."""
    return hardware.overheads.step_seconds.get(workload.engine, 0.0)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds that a rank computes for each stage of a cycle, in one micro-batch; its update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]

    @classmethod
    def of(cls, workload: Workload, stages: Stages, hardware: Hardware) -> StageSeconds:
        """Those of a workload on ranks of this hardware; the last stage has the head."""
        tokens, again = workload.tokens, workload.recomputed
        forward, backward = block_work(workload)
        backward += recomputed_work(workload) * again
        head = [hardware.seconds(work * tokens) for work in head_work(workload)]
        beside = overhead_seconds(workload, hardware)
        each_pass = hardware.memory_seconds(dequantised_bytes(workload))
        one = hardware.seconds(forward * tokens) + beside + each_pass
        back = hardware.seconds(backward * tokens) + beside + (1 + again) * each_pass
        last = len(stages) - 1
        return cls(
            tuple(n * one + head[0] * (at == last) for at, n in enumerate(stages.blocks)),
            tuple(n * back + head[1] * (at == last) for at, n in enumerate(stages.blocks)),
            tuple(
                adam_seconds(numel, hardware) + n * call_seconds(workload, hardware)
                for numel, n in zip(stages.trained, stages.blocks, strict=True)
            ),
        )

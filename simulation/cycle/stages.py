"""A model cut into a cycle's stages, as ``baselines.cyclic`` cuts it: what each has and sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baselines.cyclic.routes import Cycle, Kind
from baselines.cyclic.rule import Rule, chosen, is_fresh
from simulation.workload import Workload


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

        ``twice``: ranks let parameters go between forward and backward, frozen ones too; what is
        outside of the blocks stays.
        """
        passed = [whole - out for whole, out in zip(self.parameters, self.outside, strict=True)]
        return {
            "forward": self.parameters if twice else self.trained,
            "backward": passed,
            "gradient": self.trained,
            "sum": self.trained,
        }

    def late(self, rule: Rule, micro_batch: int) -> int:
        """Trained parameters that are a step old where this micro-batch, from 0, computes."""
        return sum(
            numel
            for stage, numel in enumerate(self.trained)
            if not is_fresh(rule, micro_batch, stage, len(self))
        )


def stages_of(workload: Workload, ranks: int) -> Stages:
    """The stages of a cycle: as many as micro-batches go through it, unless fewer are chosen.

    Raises ``ValueError`` for more stages than blocks or micro-batches, and for several
    micro-batches per rank where each rank is one.
    """
    model, cycle = workload.model, workload.schedule.cycle
    if workload.schedule.passes_on and workload.accumulation != 1:
        raise ValueError(
            f"accumulation = {workload.accumulation}: allowed is 1, as each rank is one micro-batch"
        )
    most, called = ranks, "ranks"
    if cycle == "turns":
        most, called = workload.accumulation, "micro-batches per step (accumulation)"
    size = model.block_parameters + workload.block_adapters
    runs = chosen(workload.stages, [size] * model.layers, most, called)
    blocks = tuple(len(run) for run in runs)
    outside = [0] * len(runs)
    outside[0] += model.embedded_parameters
    outside[-1] += model.root_parameters - model.embedded_parameters
    full = workload.lora is None
    trained = size if full else workload.block_adapters
    return Stages(
        blocks,
        tuple(count * size + out for count, out in zip(blocks, outside, strict=True)),
        tuple(
            count * trained + (out if full else 0)
            for count, out in zip(blocks, outside, strict=True)
        ),
        tuple(outside),
    )


def cycle_of(workload: Workload, stages: Stages, ranks: int) -> Cycle:
    """Who sends what to whom, where ranks pass stages on."""
    twice = workload.schedule.cycle == "zero"
    return Cycle(workload.rule, ranks, len(stages), twice)

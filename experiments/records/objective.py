"""Objectives of a step beside a causal language model's loss."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from baselines.description import ExtraProcess
from experiments.records.workload import ConfiguredModel, Function
from simulation.files import Strict
from simulation.transformer import ModelSpec

_Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class CausalLM(Strict):
    """The loss of the cell on its data, once per micro-batch."""

    kind: Literal["causal-lm"] = "causal-lm"

    #: Name in tables.
    name: ClassVar[str] = "causal LM"


class DPO(Strict):
    """Direct preference optimization against the model as it was.

    A sequence's second half is the answer that is preferred to itself read backwards. The
    reference is the model with its adapters off, or where all is trained a frozen copy.
    """

    kind: Literal["dpo"]
    name: ClassVar[str] = "DPO"
    #: Weight of the divergence from the reference.
    beta: _Above = 0.1


class GRPO(Strict):
    """Group relative policy optimization with generation inside of the step.

    A sequence's beginning is the prompt, and ``group`` sequences of a micro-batch answer the same.
    The reference is as in DPO.
    """

    kind: Literal["grpo"]
    #: Tokens of each answer.
    new_tokens: _Count
    #: Answers per prompt.
    group: Annotated[int, Field(ge=2)]
    #: Optimizer steps on the same answers.
    epochs: _Count = 1
    #: How far from 1 the ratio of probabilities may go before it is clipped.
    clip: _Above = 0.2
    #: Weight of the divergence from the reference.
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.04
    temperature: _Above = 1.0
    #: An answer's share of digits, or of tokens that repeat the prompt's in turn; or a function of
    #: prompts, answers and which tokens count.
    reward: Literal["digits", "copy"] | Function = "digits"
    #: Token after which nothing of an answer counts.
    end_token: Annotated[int, Field(ge=0)] | None = None
    #: Who generates: the trainer; a process on a machine of its own, with the weights that
    #: ``fcdp.publish`` writes; or such a process one version behind, while the trainer updates.
    rollout: Literal["trainer", "process", "behind"] = "trainer"

    @property
    def name(self) -> str:
        where = {"trainer": "", "process": " of a process", "behind": " of a version before"}
        return f"GRPO, {self.new_tokens} new tokens{where[self.rollout]}"

    @property
    def extra(self) -> tuple[ExtraProcess, ...]:
        """Processes that it needs beside the ranks."""
        if self.rollout == "trainer":
            return ()
        return (ExtraProcess("rollout", "experiments.worker.objectives.rollout:main"),)


class Distillation(Strict):
    """Divergence from a frozen teacher on the cell's data."""

    kind: Literal["distillation"]
    teacher: ModelSpec | ConfiguredModel
    temperature: _Above = 1.0

    @property
    def name(self) -> str:
        return f"distillation of {self.teacher.name}"


class OwnObjective(Strict):
    """A user's own objective; the function makes an ``Objective``."""

    function: Function

    @property
    def name(self) -> str:
        return self.function


AnyObjective = CausalLM | DPO | GRPO | Distillation | OwnObjective

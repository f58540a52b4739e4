"""Settings of strategies whose workers train apart for several steps. Imports no engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baselines.settings import Setting, Settings

#: Steps between two exchanges: the paper's τ.
Interval = Annotated[int, Field(ge=1), Setting("Interval", "subject", write="τ = {}".format)]
#: Who trains apart: each rank with the whole model, or each node, over whose ranks FSDP2 shards it.
Worker = Annotated[
    Literal["rank", "node"], Setting("Worker", "subject", write="a worker per {}".format)
]
#: How much of the mean displacement a worker follows: the paper's α.
OuterLearningRate = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    Setting("Outer learning rate", "subject", write="α = {:g}".format),
]
#: The paper's β.
OuterMomentum = Annotated[
    float, Field(ge=0, lt=1), Setting("Outer momentum", "subject", write="β = {:g}".format)
]
#: Whether displacements count in units of the learning rate, as SlowMo has it.
ByLearningRate = Annotated[
    bool,
    Setting(
        "By learning rate",
        "subject",
        write=lambda value: "displacements ÷ learning rate" if value else "plain displacements",
    ),
]
#: The largest outer momentum of an element: the paper's φ; ``None``: as large as it is.
Clip = Annotated[
    Annotated[float, Field(gt=0)] | None,
    Setting(
        "Clip",
        "subject",
        write=lambda value: "no clipping" if value is None else f"φ = {value:g}",
    ),
]
#: What a late displacement is divided by; see ``baselines.co2.outer``.
Penalty = Annotated[
    Literal["none", "first-step", "first-steps"],
    Setting("Penalty", "subject", write="penalty {}".format),
]


class LocalSGDSettings(Settings):
    """Settings of Local SGD."""

    interval: Interval = 12
    worker: Worker = "rank"


class SlowMoSettings(LocalSGDSettings):
    """Settings of SlowMo; its paper's momentum of language models."""

    outer_learning_rate: OuterLearningRate = 1.0
    outer_momentum: OuterMomentum = 0.5
    by_learning_rate: ByLearningRate = True


class CO2Settings(LocalSGDSettings):
    """Settings of CO2; momentum and clip are those of its authors' run of GPT-2 medium."""

    outer_learning_rate: OuterLearningRate = 1.0
    outer_momentum: OuterMomentum = 0.2
    by_learning_rate: ByLearningRate = False
    clip: Clip = 1.0
    penalty: Penalty = "first-steps"

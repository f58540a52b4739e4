"""Measured time to quality, applied to a plan by how long its link takes."""

import math
from pathlib import Path

from pydantic import Field

from simulation.files import Strict
from simulation.planner.search import Option

#: Written by ``python -m analysis time-to-quality``; there may be none.
RECORD = Path(__file__).parents[2] / "results" / "time-to-quality" / "quality.json"
#: Factor between two links' shares of time beyond which one says nothing of the other.
_ALIKE = 3


class Case(Strict):
    """Race to a loss on one link: who comes first."""

    #: Seconds that the exact strategy's bytes take on the link, over those of its computation.
    share: float = Field(gt=0)
    exact: str
    first: str
    #: Times as soon as the exact one, and whether seeds and rounds leave it open.
    sooner: float
    alike: bool
    #: Share by which its loss at the end is above the exact one's.
    above: float

    def clause(self, loss: str) -> str:
        """The clause on who comes first to the loss, which follows "On this link"."""
        if self.first == self.exact:
            return f"{self.exact} is the first to come to {loss}, and exact"
        if self.alike:
            return f"exact is as fast: {self.exact} and {self.first} come to {loss} alike"
        times = f"{self.sooner:.1f}" if self.sooner < 9.95 else f"{self.sooner:,.0f}"
        return (
            f"{self.first} comes to {loss} {times}× sooner than {self.exact}; at the end it is "
            f"{100 * abs(self.above):.1f} % {'above' if self.above > 0 else 'below'} it"
        )


class Quality(Strict):
    """Cases of one model."""

    parameters: int
    cases: tuple[Case, ...]

    def of(self, option: Option) -> str | None:
        """Sentence on the case whose link takes about as long beside computation, if any."""
        busy = option.busy_seconds
        share = busy["inter_node"] / busy["compute"]
        case = min(self.cases, key=lambda one: abs(math.log(one.share / share)))
        if abs(math.log(case.share / share)) > math.log(_ALIKE):
            return None
        return (
            f"time to quality, emulated on CPUs with {self.parameters / 1e6:.1f} M parameters, "
            f"where the link takes {case.share:.2g} times the computation (here {share:.2g}): "
            + case.clause(f"{case.exact}'s loss at half of its steps")
        )


def committed() -> Quality | None:
    """The committed cases, if there are any."""
    return Quality.model_validate_json(RECORD.read_bytes()) if RECORD.exists() else None

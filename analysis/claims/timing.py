"""How sure a speed-up is that was timed: intervals of medians, over as many steps as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from analysis.claims.computations import Computation, Ratio, Sample, taken

#: A timed comparison over fewer steps, in either cell, decides nothing.
STEPS = 15
#: Times that each cell's steps are drawn anew, and the share of the quotients that an interval has.
_DRAWN, _WITHIN = 2000, 0.95


@dataclass(frozen=True)
class Timing:
    """A comparison of emulated or measured times."""

    #: The fewest of all cells.
    steps: int
    #: In basic units; ``None`` where a cell has one step.
    interval: tuple[float, float] | None

    @property
    def enough(self) -> bool:
        """Whether it may decide anything."""
        return self.steps >= STEPS


def timing(samples: Sequence[Sample], compute: Computation) -> Timing | None:
    """That of these samples; ``None`` where no times are compared, or they were computed."""
    if not isinstance(compute, Ratio) or compute.quantity != "tokens_per_s":
        return None
    timed = [sample for sample in samples if _seconds(sample)]
    if not timed:
        return None
    steps = min(len(seconds) for sample in timed for seconds in _seconds(sample))
    if steps == 1:
        return Timing(steps, None)
    ends = [_interval(sample, compute) for sample in timed]
    low, high = (
        taken([Sample(end[at], sample.row) for end, sample in zip(ends, timed, strict=True)],
              compute.take)
        for at in (0, 1)
    )  # fmt: skip
    return Timing(steps, (low, high))


def _seconds(sample: Sample) -> tuple[Sequence[float], ...]:
    """The steps of the two cells; none where either has none."""
    both = (sample.row, sample.over)
    found = tuple(row.step_seconds for row in both if row is not None and row.step_seconds)
    return found if len(found) == len(both) else ()


def _interval(sample: Sample, compute: Ratio) -> tuple[float, float]:
    """Of the quotient of medians, by drawing the steps of both cells anew."""
    ours, theirs = _seconds(sample)
    # The same records give the same interval.
    draw = np.random.default_rng(crc32(np.array([*ours, *theirs]).tobytes()))
    medians = [
        np.median(draw.choice(seconds, (_DRAWN, len(seconds))), axis=1)
        for seconds in (ours, theirs)
    ]
    # Of the tokens of a step, too, if they are not alike.
    assert sample.over is not None
    ratio = sample.row.quantities["tokens_per_s"] / sample.over.quantities["tokens_per_s"]
    middle = float(np.median(theirs) / np.median(ours))
    tail = (1 - _WITHIN) / 2
    found = np.quantile(medians[1] / medians[0], [tail, 1 - tail])
    ends = sorted(compute.of_quotient(ratio / middle * float(end)) for end in found)
    return ends[0], ends[1]

"""Predicted steps compared with measured ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from simulation import framing
from simulation.calibration import MeasuredStep
from simulation.prediction import Prediction, predict


@dataclass(frozen=True)
class Comparison:
    """A step that was run, and its prediction."""

    measured: MeasuredStep
    prediction: Prediction

    @property
    def relative_error(self) -> float:
        """Relative error of the predicted time; above 0 where the prediction is too slow."""
        return self.prediction.step_seconds / self.measured.seconds - 1

    @property
    def bytes_agree(self) -> bool:
        """Whether the bytes differ by no more than protocol overhead."""
        step = self.measured
        return framing.agree(
            step.workload,
            step.hardware.nodes,
            step.hardware.ranks_per_node,
            predicted=self.prediction.inter_node_bytes,
            counted=step.inter_node_bytes,
        )

    @property
    def counted_share(self) -> float:
        """Ratio of counted to predicted bytes; 1 where nothing crosses, as on one node."""
        if not self.prediction.inter_node_bytes:
            return math.inf if self.measured.inter_node_bytes else 1.0
        return self.measured.inter_node_bytes / self.prediction.inter_node_bytes


def compare(step: MeasuredStep) -> Comparison:
    """Simulate the step on the cluster that it ran on."""
    return Comparison(step, predict(step.workload, step.hardware))


def median_absolute_error(comparisons: Sequence[Comparison]) -> float:
    """Median error of the steps' times, as a share.

    Raises ``ValueError`` where nothing was compared.
    """
    if not comparisons:
        raise ValueError("comparisons = []: must hold at least one cell that ran")
    return median(abs(comparison.relative_error) for comparison in comparisons)

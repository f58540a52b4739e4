"""What was predicted against what was measured, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from experiments.costs import framing
from experiments.costs.emulated import emulated
from experiments.costs.hardware import Hardware
from experiments.costs.workload import Workload
from experiments.records import Cell, Record
from experiments.simulator.prediction import Prediction, predict


@dataclass(frozen=True)
class Comparison:
    """One cell that was run and simulated."""

    record: Record
    measured_seconds: float
    measured_inter_node_bytes: float
    prediction: Prediction

    @property
    def relative_error(self) -> float:
        """Of the step's time; above 0 where the prediction is too slow."""
        return self.prediction.step_seconds / self.measured_seconds - 1

    @property
    def bytes_agree(self) -> bool:
        """Whether the bytes differ by no more than framing."""
        predicted = self.prediction.inter_node_bytes
        return framing.agree(self.record.cell, predicted, self.measured_inter_node_bytes)

    @property
    def counted_share(self) -> float:
        """Counted over predicted bytes."""
        return self.measured_inter_node_bytes / self.prediction.inter_node_bytes


def hardware_of(cell: Cell) -> Hardware:
    """The emulated cluster of a cell."""
    cluster = cell.cluster
    return emulated(cluster.nodes, cluster.ranks_per_node, cell.inter_bandwidth_bits_per_s)


def compare(
    records: Sequence[Record], hardware: Callable[[Cell], Hardware] = hardware_of
) -> list[Comparison]:
    """Simulate every cell that ran, on the cluster that ``hardware`` says it ran on."""
    found = []
    for record in records:
        seconds, measured = record.step_seconds_median, record.measurement
        if seconds is None or measured is None:
            continue
        prediction = predict(Workload.of(record.cell), hardware(record.cell))
        sent = measured.inter_node_bytes_per_step
        found.append(Comparison(record, seconds, sent, prediction))
    return found


def median_absolute_error(comparisons: Sequence[Comparison]) -> float:
    """Of the steps' times, as a share. Raises ``ValueError`` where nothing was compared."""
    if not comparisons:
        raise ValueError("comparisons = []: must hold at least one cell that ran")
    return median(abs(comparison.relative_error) for comparison in comparisons)

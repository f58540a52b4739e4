"""Small clusters that stand in for large ones: the same ratio of communication to computation."""

from __future__ import annotations

from simulation.emulated import PAYLOAD_SHARE
from simulation.hardware import Hardware
from simulation.prediction import Prediction, predict
from simulation.workload import Workload


def communication_to_computation(workload: Workload, hardware: Hardware) -> float:
    """Seconds that a node's link is busy per second of a rank's computation."""
    prediction = predict(workload, hardware)
    seconds = prediction.inter_node_bytes / hardware.inter_bytes_per_s
    return seconds / _computation_seconds(prediction)


def link_bits_per_s(ratio: float, workload: Workload, unlimited: Hardware) -> float:
    """The limit of an emulated link, in bits per second, at which the workload has this ratio.

    ``unlimited`` is the emulated cluster without a limit.
    """
    prediction = predict(workload, unlimited)
    seconds = ratio * _computation_seconds(prediction)
    return 8 * prediction.inter_node_bytes / seconds / PAYLOAD_SHARE


def _computation_seconds(prediction: Prediction) -> float:
    return prediction.timeline.busy_seconds()["compute"]

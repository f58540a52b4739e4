"""What ``simulation.framing`` says of a cell: bytes that its nodes send beside the payload."""

from __future__ import annotations

from experiments.records.cell import Cell
from experiments.records.modelled import workload_of
from simulation import framing


def framing_bytes(cell: Cell, payload: float) -> float:
    """What a node may send in a step of the cell with so many bytes of payload, beside it."""
    return framing.framing_bytes(workload_of(cell), *_shape(cell), payload)


def agree(cell: Cell, predicted: float, counted: float) -> bool:
    """Whether the kernel has counted the bytes that were predicted, within framing."""
    return framing.agree(workload_of(cell), *_shape(cell), predicted=predicted, counted=counted)


def messages(cell: Cell) -> int:
    """Messages that a node of the cell sends to others in a step over gloo."""
    return framing.messages(workload_of(cell), *_shape(cell))


def whole_bytes(cell: Cell) -> float:
    """Least bytes that a node sends of what DeepSpeed keeps whole on every rank."""
    return framing.whole_bytes(workload_of(cell), *_shape(cell))


def _shape(cell: Cell) -> tuple[int, int]:
    return cell.cluster.nodes, cell.cluster.ranks_per_node

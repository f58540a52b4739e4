"""A matrix: the cells that are run and compared together."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.records.abilities import Evidence
from experiments.records.cell import AnyCluster, Cell


@dataclass(frozen=True)
class MatrixCell:
    """A cell of a matrix, and why it is not run if it is not."""

    cell: Cell
    skip_reason: str | None


@dataclass(frozen=True)
class Matrix:
    """An expanded matrix: its cells in the order in which they run."""

    name: str
    description: str
    cluster: AnyCluster
    cells: tuple[MatrixCell, ...]
    #: Whether they are simulated, on whatever cluster they are.
    simulated: bool = False
    #: The strategy whose losses all others must reach, if they are to be compared.
    reference: str | None = None

    @property
    def evidence(self) -> Evidence:
        if self.simulated:
            return "simulated"
        return self.cluster.can.evidence

"""What a run would do: its cells, and the simulator's time and memory of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baselines import sizes
from experiments import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.matrix.matrix import Matrix, MatrixCell
    from experiments.records.cell import Cell
    from experiments.records.record import Record

#: Host memory of one rank's process beside what the simulator counts, in bytes: with modules that
#: all ranks share it is about as much as it is without.
_PROCESS = 200e6


@dataclass(frozen=True)
class _Estimate:
    """The simulator's answer for one cell; ``None`` what it does not know."""

    step_seconds: float
    steps: int
    #: One rank's device and one node's host; on an emulated cluster both are this machine's.
    device_bytes: float
    host_bytes: float
    here_bytes: float | None

    @property
    def seconds(self) -> float:
        return self.step_seconds * self.steps

    def __str__(self) -> str:
        if self.here_bytes is not None:
            memory = f"{sizes.written(self.here_bytes)} of this machine"
        else:
            memory = f"{sizes.written(self.device_bytes)} per device"
            memory += f", {sizes.written(self.host_bytes)} per host" if self.host_bytes else ""
        return f"{self.step_seconds:.3g} s/step, {memory}"


def show(
    matrix: Matrix, cells: Sequence[MatrixCell], finished: Sequence[Record], memory_bytes: float
) -> None:
    """List the cells: which would run, how long, and in how much memory, as the simulator has it.

    Ends the command where a cell needs more than this machine's ``memory_bytes``.
    """
    console, done = terminal.console(), {record.cell_id: record.state for record in finished}
    total, steps, running, unknown, largest = 0.0, 0, 0, 0, (0.0, "")
    for entry in cells:
        cell = entry.cell
        if entry.skip_reason is not None:
            _say(console, f"{cell.id}  skipped: {entry.skip_reason}", dim=True)
        elif cell.id in done:
            _say(console, f"{cell.id}  has a record: {done[cell.id]}", dim=True)
        else:
            found = _estimate(cell)
            running, steps = running + 1, steps + cell.warmup_steps + cell.steps
            if found is None:
                unknown += 1
            else:
                total += found.seconds
                largest = max(largest, (found.here_bytes or 0.0, cell.id))
            _say(console, cell.id if found is None else f"{cell.id}  {found}")
    skipped = sum(entry.skip_reason is not None for entry in cells)
    counts = f"{running} cells to run, {steps} steps in all, {skipped} skipped"
    times = (
        "" if matrix.simulated or unknown == running else f"; simulated, {_clock(total)} of steps"
    )
    beside = f", {unknown} cells unknown" if unknown and times else ""
    console.print(f"{matrix.name}: {counts}{times}{beside}", style="bold", highlight=False)
    if largest[0] > memory_bytes:
        terminal.stop(
            f"{largest[1]} needs about {sizes.written(largest[0])}, and this machine has "
            f"{sizes.written(memory_bytes)}: make it smaller (--set), or leave it out (--only)"
        )


def _say(console: Console, text: str, *, dim: bool = False) -> None:
    style = "dim" if dim else ""
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def _estimate(cell: Cell) -> _Estimate | None:
    from experiments.records.modelled import cluster_of, why_not_simulated, workload_of
    from simulation.prediction import predict

    if not cell.cluster.can.describe_hardware or why_not_simulated(cell) is not None:
        return None
    try:
        found = predict(workload_of(cell), cluster_of(cell))
    except ValueError:  # a strategy that is not simulated
        return None
    needs, cluster = found.footprint, cell.cluster
    each = cluster.ranks_per_node * (needs.device_bytes + _PROCESS) + needs.host_bytes
    return _Estimate(
        found.step_seconds,
        cell.warmup_steps + cell.steps,
        needs.device_bytes,
        needs.host_bytes,
        cluster.nodes * each if cluster.can.make_nodes else None,
    )


def _clock(seconds: float) -> str:
    from experiments.terminal.progress import clock

    return clock(seconds)

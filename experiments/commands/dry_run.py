"""What a run would do: its cells, and the simulator's time and memory of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments import terminal
from fcdp.sizes import written

if TYPE_CHECKING:
    from experiments.matrix.matrix import Matrix, MatrixCell
    from experiments.records.cell import Cell
    from experiments.records.record import Record
    from simulation.instances import Instance

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
            memory = f"{written(self.here_bytes)} of this machine"
        else:
            memory = f"{written(self.device_bytes)} per device"
            memory += f", {written(self.host_bytes)} per host" if self.host_bytes else ""
        return f"{self.step_seconds:.3g} s/step, {memory}"


def show(
    matrix: Matrix,
    cells: Sequence[MatrixCell],
    finished: Sequence[Record],
    memory_bytes: float,
    instance: Instance | None = None,
) -> None:
    """List the cells: which would run, how long, and in how much memory, as the simulator has it.

    With ``instance`` its nodes are such instances, and the total has the price of their steps.
    Ends the command where a cell needs more than this machine's ``memory_bytes``.
    """
    from experiments.terminal.progress import clock

    console, done = terminal.console(), {record.cell_id: record.state for record in finished}
    total, steps, running, unknown, largest = 0.0, 0, 0, 0, (0.0, "")
    for entry in cells:
        cell = entry.cell
        if entry.skip_reason is not None:
            said = f"{cell.id}  skipped: {entry.skip_reason}"
            terminal.say_as_it_is(console, said, "dim")
        elif cell.id in done:
            said = f"{cell.id}  has a record: {done[cell.id]}"
            terminal.say_as_it_is(console, said, "dim")
        else:
            found = _estimate(cell, instance)
            running, steps = running + 1, steps + cell.warmup_steps + cell.steps
            if isinstance(found, str):
                unknown += 1
            else:
                total += found.seconds
                largest = max(largest, (found.here_bytes or 0.0, cell.id))
            terminal.say_as_it_is(console, f"{cell.id}  {found}")
    skipped = sum(entry.skip_reason is not None for entry in cells)
    counts = f"{running} cells to run, {steps} steps in all, {skipped} skipped"
    times = (
        "" if matrix.simulated or unknown == running else f"; simulated, {clock(total)} of steps"
    )
    if times and instance is not None:
        times += _price(instance, matrix.cluster.nodes, total)
    beside = f", {unknown} cells unknown" if unknown and times else ""
    console.print(f"{matrix.name}: {counts}{times}{beside}", style="bold", highlight=False)
    if largest[0] > memory_bytes:
        terminal.stop(
            f"{largest[1]} needs about {written(largest[0])}, and this machine has "
            f"{written(memory_bytes)}: make it smaller (--set), or leave it out (--only)"
        )


def _price(instance: Instance, nodes: int, seconds: float) -> str:
    price = instance.list_usd_per_hour
    if price is None:
        return f", whose price on {nodes} × {instance.instance} is not known"
    cost = nodes * price * seconds / 3600
    return f", {cost:,.2f} USD on {nodes} × {instance.instance} ({price:g} USD per hour)"


def _estimate(cell: Cell, instance: Instance | None) -> _Estimate | str:
    """The simulator's answer, or why it has none."""
    from experiments.records.modelled import cluster_of, why_not_simulated, workload_of
    from simulation.prediction import predict

    if instance is None and not cell.cluster.can.describe_hardware:
        return "on hardware that is not known: --instance says which"
    if (why := why_not_simulated(cell)) is not None:
        return why
    hardware = cluster_of(cell) if instance is None else instance.cluster(cell.cluster.nodes)
    try:
        found = predict(workload_of(cell), hardware)
    except ValueError as error:
        return f"is not simulated: {error}"
    needs, cluster = found.footprint, cell.cluster
    each = cluster.ranks_per_node * (needs.device_bytes + _PROCESS) + needs.host_bytes
    return _Estimate(
        found.step_seconds,
        cell.warmup_steps + cell.steps,
        needs.device_bytes,
        needs.host_bytes,
        cluster.nodes * each if cluster.can.make_nodes else None,
    )

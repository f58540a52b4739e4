"""The tasks of one steady step, by how the strategy's ranks go through it."""

from __future__ import annotations

from simulation.hardware import Hardware
from simulation.step.placement import Placement
from simulation.step.schedule import Step
from simulation.step.slots import Slots
from simulation.step.tasks import Tasks
from simulation.step.turns import turns
from simulation.units import Layout
from simulation.workload import Workload


def step(workload: Workload, units: Layout, placement: Placement, hardware: Hardware) -> Tasks:
    """One steady step: ranks do the same at once, or go two slots apart, or take turns."""
    schedule = workload.schedule
    if schedule.passes_on:
        return Slots(hardware, workload=workload)
    if schedule.cycle == "turns":
        return turns(workload, hardware)
    return Step(workload, schedule, units, placement, hardware).build()

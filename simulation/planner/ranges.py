"""Ranges of predictions, and what they rest on."""

from __future__ import annotations

import math

from simulation.compute.constants import record
from simulation.hardware import Hardware
from simulation.planner.option import Speed

#: Factors of the rates of links, where data sheets alone are known and where they were measured:
#: ours.
_NOMINAL_LINKS, _MEASURED_LINKS = (0.75, 1.2), (0.95, 1.05)
_COMPUTE = ("compute",)
_UNSEEN = "the other half of the sizes"


def tokens_per_s(speed: Speed, hardware: Hardware) -> tuple[float, float]:
    """Tokens per second between which nine of ten such steps are expected.

    What the step waits for becomes slower or faster, each resource by its own range: at most so
    much, as what waited behind it may come before.
    """
    rates = hardware.rates
    measured = rates is not None and rates.basis.startswith("preflight")
    links = _MEASURED_LINKS if measured else _NOMINAL_LINKS
    compute = (1.0, 1.0) if rates is None else (rates.lowest, rates.highest)
    low, high = (
        sum(
            seconds / (compute[end] if name in _COMPUTE else links[end])
            for name, seconds in speed.waits_seconds.items()
        )
        for end in (0, 1)
    )
    return (
        speed.tokens_per_s * speed.step_seconds / low,
        speed.tokens_per_s * speed.step_seconds / high,
    )


def tie() -> float:
    """Relative difference of two predictions below which the simulator cannot order them.

    Two that err independently by the median error of runs that the fit had not seen differ by √2
    times that. What all predictions for a GPU have in common does not change their order.
    """
    return math.sqrt(2) * record().check(_UNSEEN).median


def rests_on(hardware: Hardware) -> str:
    """What the seconds of computation rest on, in words, with their range."""
    rates = hardware.rates
    if rates is None:
        return f"data sheet, of which {hardware.matmul_efficiency:.0%} are taken to be reached"
    span = f"{rates.lowest - 1:+.0%} to {rates.highest - 1:+.0%}"
    texts = {
        "fitted": f"fitted to runs on {rates.measured_on}",
        "nearest architecture": f"no run on {hardware.device.name} is known: data sheet, by the "
        f"shares that {rates.measured_on} reached",
        "preflight": "matrix products measured by preflight, the rest by the shares that "
        f"{rates.measured_on} reached",
        "preflight's block": "a transformer block measured by preflight, its parts by the shares "
        f"that {rates.measured_on} reached",
        "data sheet": "data sheet",
    }
    return f"{texts[rates.basis]}; {span}"

"""Rates of any GPU: by its own rows, or by those of the GPU whose architecture is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from simulation.compute import study
from simulation.hardware import Gpu, Hardware
from simulation.rates import Rates, Work

#: The measured GPU whose architecture is nearest; others have an A100's.
_NEAREST: Mapping[str, str] = MappingProxyType(
    {
        "a100-40gb": "a100-40gb",
        "h100-sxm": "h100-sxm",
        "h100-pcie": "h100-sxm",
        "h200": "h100-sxm",
        "b200": "h100-sxm",
    }
)
_USUAL = "a100-80gb"
#: Least share of the prediction that is thought possible of cards without a rack's power: they do
#: not hold the clocks of their data sheets in matrix products. Ours.
_LEAST_OF_CARDS = 0.55


@cache
def record() -> study.ComputeRecord:
    """The committed fit."""
    return study.read()


def rates_of(device: Gpu) -> Rates:
    """The rates of the GPU, with their range and what they rest on."""
    known = record()
    rates = known.fitted().rates(device, _NEAREST.get(device.name, _USUAL))
    if rates.basis == "fitted":
        check = known.check("each size")
        return replace(rates, lowest=check.lowest, highest=check.highest)
    check = known.check("each architecture")
    lowest = min(check.lowest, _LEAST_OF_CARDS) if device.link_is_pcie else check.lowest
    return replace(rates, lowest=lowest, highest=check.highest)


def by_block(device: Gpu, work: Work, seconds: float) -> Rates:
    """The GPU's rates where one transformer block, of this work, was measured.

    All parts are as much faster or slower than fitted; what is left to err is what runs of sizes
    that the fit had not seen do.
    """
    check = record().check("each size")
    return replace(
        rates_of(device).with_block(work, seconds), lowest=check.lowest, highest=check.highest
    )


def with_rates(hardware: Hardware) -> Hardware:
    """The cluster whose GPUs compute at fitted rates."""
    return replace(hardware, rates=rates_of(hardware.device))

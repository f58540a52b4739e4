"""Device memory as it is: what cards report, less what CUDA, NCCL and fragmentation take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from simulation.hardware import Hardware

_MIB = 2**20
#: Total memory as ``nvidia-smi`` reports it, in MiB; data sheets round it.
_REPORTED_MIB: Mapping[str, int] = MappingProxyType(
    {
        "a40": 46_068,
        "a100-40gb": 40_960,
        "a100-80gb": 81_920,
        "h100-sxm": 81_559,
        "h100-pcie": 81_559,
        "h200": 143_771,
        "b200": 183_359,
        "l40s": 46_068,
        "l4": 23_034,
        "rtx4090": 24_564,
        "a10": 23_028,
        "a10g": 23_028,
        "v100-16gb": 16_384,
        "v100-32gb": 32_768,
    }
)
#: What CUDA's context, its libraries and NCCL's buffers take, and the share that fragmentation
#: does: ours. With them an A40 has no more than the study on imitated devices has tried.
_LIBRARIES_BYTES = 1.9e9
_FRAGMENTED = 0.05


def reported(hardware: Hardware) -> Hardware:
    """The cluster whose devices have what such cards report, less what programs cannot use."""
    mib = _REPORTED_MIB.get(hardware.device.name)
    memory = hardware.device.memory_bytes if mib is None else float(mib * _MIB)
    return reserved(replace(hardware, device=replace(hardware.device, memory_bytes=memory)))


def reserved(hardware: Hardware) -> Hardware:
    """The cluster whose devices' memory was measured, less what programs cannot use."""
    reserve = _LIBRARIES_BYTES + _FRAGMENTED * hardware.device.memory_bytes
    return replace(hardware, device_reserve_bytes=reserve)

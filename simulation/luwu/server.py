"""LuWu's server, as a prediction takes it."""

from __future__ import annotations

from dataclasses import dataclass

from simulation import checks
from simulation.hardware import GB, LINK_EFFICIENCY, Hardware

#: Of one NVMe drive, sequential, by the data sheet of the D7-P5510 (3.84 TB), of which the server
#: of LuWu's paper has twelve.
DRIVE_READ, DRIVE_WRITE = 6.5 * GB, 3.4 * GB


@dataclass(frozen=True, kw_only=True)
class Server:
    """A machine beside the workers: rates that are reached. Its link is full duplex."""

    link_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    #: Of AdamW on its CPUs.
    adam_elements_per_s: float
    #: What it is, in words.
    description: str

    def __post_init__(self) -> None:
        checks.positive(
            link_bytes_per_s=self.link_bytes_per_s,
            disk_read_bytes_per_s=self.disk_read_bytes_per_s,
            disk_write_bytes_per_s=self.disk_write_bytes_per_s,
            adam_elements_per_s=self.adam_elements_per_s,
        )


def like(hardware: Hardware) -> Server:
    """A server that has what a node has, as on an emulated cluster."""
    return Server(
        link_bytes_per_s=hardware.inter_bytes_per_s,
        disk_read_bytes_per_s=hardware.disk_read_bytes_per_s,
        disk_write_bytes_per_s=hardware.disk_write_bytes_per_s,
        adam_elements_per_s=hardware.cpu_adam_elements_per_s,
        description="a server like a node",
    )


def nominal(bits_per_s: float, drives: int, hardware: Hardware) -> Server:
    """A server by its nominal bandwidth and number of drives; it steps as a node's CPUs do."""
    return Server(
        link_bytes_per_s=LINK_EFFICIENCY * bits_per_s / 8,
        disk_read_bytes_per_s=drives * DRIVE_READ,
        disk_write_bytes_per_s=drives * DRIVE_WRITE,
        adam_elements_per_s=hardware.cpu_adam_elements_per_s,
        description=f"a server with {drives} NVMe drives",
    )

"""Tasks as they are added, each with what it takes of the cluster's resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulation.hardware import Hardware
from simulation.step.events import Task, Timeline, simulate
from simulation.traffic import Traffic

#: Stream of what stops the host's one thread, or the device.
COMPUTE = "compute"


@dataclass
class Tasks:
    """The tasks so far, and the bytes that they move: one node's, by link and phase."""

    hardware: Hardware
    tasks: list[Task] = field(default_factory=list)
    moved_bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    #: What exchanges take that are alike, as those of all blocks are.
    _exchanges: dict[tuple[Traffic, float, float], tuple[dict[str, float], float]] = field(
        default_factory=dict
    )

    def timeline(self) -> Timeline:
        """The step, event by event."""
        return simulate(self.tasks)

    def compute(self, name: str, seconds: float, after: Sequence[int]) -> int:
        """Append a rank's computation; returns its index, as the other methods do."""
        return self.add(name, COMPUTE, {"compute": seconds}, after)

    def exchange(
        self,
        name: str,
        stream: str,
        traffic: Traffic,
        phase: str,
        after: Sequence[int],
        gathered_bytes: float = 0.0,
        reduced_bytes: float = 0.0,
    ) -> int:
        """Append an exchange among ranks, with what it takes of PCIe and of computation.

        ``gathered_bytes`` are those that each rank has at its end and had not before,
        ``reduced_bytes`` those that it had and gives.
        """
        self.count("inter_node", phase, traffic.inter_node_bytes)
        self.count("intra_node", phase, traffic.intra_node_bytes)
        known = (traffic, gathered_bytes, reduced_bytes)
        if known not in self._exchanges:
            demands = self._demands(traffic, gathered_bytes, reduced_bytes)
            self._exchanges[known] = used(demands), traffic.latency_seconds(self.hardware)
        demands, latency = self._exchanges[known]
        return self._append(name, stream, demands, after, latency)

    def _demands(
        self, traffic: Traffic, gathered_bytes: float, reduced_bytes: float
    ) -> dict[str, float]:
        """What an exchange takes of each resource."""
        hardware = self.hardware
        demands = {
            "inter_node": traffic.inter_node_bytes / hardware.inter_bytes_per_s,
            "intra_node": traffic.intra_rank_bytes / hardware.intra_bytes_per_s,
        }
        over_pcie = 0.0
        if hardware.nic_shares_pcie:
            over_pcie += traffic.inter_node_bytes / hardware.ranks_per_node
        if hardware.intra_shares_pcie:
            over_pcie += traffic.intra_rank_bytes
        demands["host_to_device"] = over_pcie / hardware.host_to_device_bytes_per_s
        demands["device_to_host"] = over_pcie / hardware.device_to_host_bytes_per_s
        sent = traffic.inter_node_bytes + traffic.intra_node_bytes
        # Ranks that share their cores share what all of them send, too.
        sharing = hardware.ranks_sharing_device / hardware.ranks_per_node
        demands["compute"] = hardware.overheads.byte_seconds * sharing * sent
        arrived = gathered_bytes * hardware.ranks_sharing_device
        demands["compute"] += hardware.overheads.gathered_byte_seconds * arrived
        exchanged = gathered_bytes + reduced_bytes
        demands["compute"] += exchanged / hardware.rates.exchanged_bytes_per_s
        messages = traffic.inter_messages + traffic.intra_messages
        demands["compute"] += hardware.overheads.message_seconds * messages
        return demands

    def copy(
        self, name: str, link: str, stream: str, nbytes: float, phase: str, after: Sequence[int]
    ) -> int:
        """Append a rank's copy of ``nbytes`` between host and device."""
        to_device = link == "host_to_device"
        rate = (
            self.hardware.host_to_device_bytes_per_s
            if to_device
            else self.hardware.device_to_host_bytes_per_s
        )
        self.count(link, phase, nbytes * self.hardware.ranks_per_node)
        return self.add(name, stream, {link: nbytes / rate}, after)

    def disk(self, name: str, kind: str, nbytes: float, phase: str, after: Sequence[int]) -> int:
        """Append a node's ``read`` or ``write`` of ``nbytes``."""
        rate = (
            self.hardware.disk_read_bytes_per_s
            if kind == "read"
            else self.hardware.disk_write_bytes_per_s
        )
        self.count("disk", phase, nbytes)
        return self.add(name, f"disk {kind}", {"disk": nbytes / rate}, after)

    def add(
        self,
        name: str,
        stream: str,
        demands: Mapping[str, float],
        after: Sequence[int],
        latency_seconds: float = 0.0,
    ) -> int:
        return self._append(name, stream, used(demands), after, latency_seconds)

    def _append(
        self,
        name: str,
        stream: str,
        used: Mapping[str, float],
        after: Sequence[int],
        latency_seconds: float,
    ) -> int:
        self.tasks.append(Task(name, stream, used, tuple(after), latency_seconds))
        return len(self.tasks) - 1

    def count(self, link: str, phase: str, nbytes: float) -> None:
        if nbytes:
            phases = self.moved_bytes.setdefault(link, {})
            phases[phase] = phases.get(phase, 0.0) + nbytes


def used(demands: Mapping[str, float]) -> dict[str, float]:
    """The resources that a task does use, with their seconds."""
    return {resource: seconds for resource, seconds in demands.items() if seconds > 0}

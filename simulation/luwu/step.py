"""LuWu's steps as tasks: what workers, switch and server do, for the simulator's events.

The order is that of ``baselines.luwu.train``. A layer's bytes cross the server's link and a node's
as a pipeline of chunks, each of which the switch passes on when it is whole. The server reads,
steps and writes a layer while its gradients arrive. What this leaves out: messages that are not
whole chunks, bursts that a limited link lets through, and files that share the disk's time
unevenly between reading ahead and stepping.
"""

from __future__ import annotations

from collections.abc import Sequence

from baselines.luwu import LAYERS, WINDOW
from simulation import activations
from simulation.hardware import Hardware
from simulation.luwu.server import Server
from simulation.luwu.traffic import STATE_BYTES, Unit, passes, units
from simulation.step.tasks import Tasks
from simulation.work import block_work, head_work, recomputed_work
from simulation.workload import Workload

#: Steps before the one that counts, until each begins as the one before it did.
_BEFORE = 2
#: Seconds per byte that one end of CURVE takes of the emulated host: 14 ms of a core per megabyte
#: (docs/luwu.md), of two cores.
_CURVE_BYTE_SECONDS = 14e-9 / 2
#: Whose hooks and calls a block has on the emulated host: nothing was fitted to LuWu.
_CALLS_LIKE = "fsdp2"


def steps(workload: Workload, hardware: Hardware, server: Server) -> tuple[Tasks, int]:
    """Tasks of some steps, and the first of those of the last, which is a steady one."""
    made = _Steps(workload, hardware, server)
    for _ in range(_BEFORE):
        made.step()
    begin = len(made.tasks.tasks)
    made.tasks.moved_bytes.clear()
    made.step()
    return made.tasks, begin


class _Steps:
    """Builds the tasks of one step after another."""

    def __init__(self, workload: Workload, hardware: Hardware, server: Server) -> None:
        self.tasks = Tasks(hardware)
        self._workload = workload
        self._hardware = hardware
        self._server = server
        self._units = units(workload)
        fastest = max(server.link_bytes_per_s, hardware.inter_bytes_per_s)
        #: Seconds by which a chunk is later as the switch passes it on when it is whole: those on
        #: the faster link, as the slower one is what all chunks wait for.
        self._hop = workload.chunk_bytes / fastest
        window = WINDOW * workload.chunk_bytes
        largest = max(unit.held(workload) for unit in self._units)
        #: Layers that come ahead of the one that computes, by memory and as chunks on their way.
        self._ahead = LAYERS + int(window // largest)
        self._window = float(window)
        #: Computation by the layers that are pulled one after another.
        self._computed: list[int] = []
        #: Per unit: the task after which the server has applied its last gradients.
        self._applied: dict[Unit, int] = {}
        #: When the last gradients have arrived, whose sender then asks for the next forward.
        self._asked: tuple[int, ...] = ()
        #: This step's pushes and their bytes, and when the last of them has arrived.
        self._pushes: list[tuple[int, float]] = []
        self._arrived = 0

    def step(self) -> None:
        """Append one step's tasks."""
        workload, tokens = self._workload, self._workload.tokens
        root, *blocks = self._units
        forward, backward = passes(self._units)
        block, back = block_work(workload)
        head_forward, head_backward = head_work(workload)
        back += recomputed_work(workload) * workload.recomputed
        committed = tuple(self._applied.values())
        begin, turn = self._asked, self._asked
        self._pushes = []
        seconds = self._hardware.seconds(block * tokens) + self._calls()
        for place, unit in enumerate(forward):
            if unit is blocks[-1]:  # as it comes to the last block it asks for backward
                turn = tuple(self._computed[-1:])
            arrived = self._pull(unit, "forward", begin)
            if place == len(forward) - 1:
                work = (head_forward + head_backward) * tokens
                self._compute("head", self._hardware.seconds(work), arrived)
            else:
                self._compute(f"forward {unit.name}", seconds if place else 0.0, arrived)
        seconds = self._hardware.seconds(back * tokens) + self._calls()
        for unit in backward:
            arrived = self._pull(unit, "backward", turn)
            self._compute(f"backward {unit.name}", seconds, (*arrived, *self._waited()))
            self._push(unit, committed)
        self._push(root, committed)
        self._asked = (self._landed,)

    @property
    def _landed(self) -> int:
        """The last gradients' arrival at the server; without any, the last computation."""
        return self._arrived if self._pushes else self._computed[-1]

    def _calls(self) -> float:
        """Seconds beside matrix products, in one forward or backward of a block."""
        overheads = self._hardware.overheads
        kept = self._workload.tokens * activations.block_bytes(self._workload)
        kept *= self._hardware.ranks_sharing_device
        calls = overheads.block_seconds.get(_CALLS_LIKE, 0.0)
        return (calls + overheads.activation_byte_seconds * kept) / 2

    def _compute(self, name: str, seconds: float, after: Sequence[int]) -> None:
        self._computed.append(self.tasks.compute(name, seconds, after))

    def _pull(self, unit: Unit, phase: str, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Have a layer sent: when it is asked for, applied, and two layers' memory has room."""
        nbytes = unit.pulled(self._workload)
        room = self._computed[-self._ahead :][:1] if len(self._computed) >= self._ahead else []
        after = dict.fromkeys([*asked, *room, *self._applied_of(unit)])
        ranks = self._hardware.ranks_per_node
        demands = {
            "server_out": nbytes / self._server.link_bytes_per_s,
            "inter_node_in": ranks * nbytes / self._hardware.inter_bytes_per_s,
            "server_disk": nbytes / self._server.disk_read_bytes_per_s,
            "host_to_device": unit.held(self._workload) / self._hardware.host_to_device_bytes_per_s,
            "compute": self._encrypted(nbytes),
        }
        self.tasks.count("inter_node_in", phase, ranks * nbytes)
        self.tasks.count("server_out", phase, nbytes)
        title = f"{phase} pull {unit.name}"
        sent = self.tasks.add(title, "pull", demands, tuple(after))
        # What is pulled in pieces as large as a chunk arrives one piece later.
        return (self.tasks.add(f"{title} arrives", "arrive", {}, (sent,), self._hop_of(nbytes)),)

    def _applied_of(self, unit: Unit) -> list[int]:
        return [self._applied[unit]] if unit in self._applied else []

    def _push(self, unit: Unit, committed: tuple[int, ...]) -> None:
        """Have a layer's gradients sent and applied."""
        workload, server = self._workload, self._server
        nbytes = unit.pushed(workload)
        if not nbytes:
            return
        ranks, after = self._hardware.ranks_per_node, tuple(self._computed[-1:])
        demands = {
            "inter_node": ranks * nbytes / self._hardware.inter_bytes_per_s,
            "server_in": nbytes / server.link_bytes_per_s,
            "device_to_host": nbytes / self._hardware.device_to_host_bytes_per_s,
            "compute": self._encrypted(nbytes),
        }
        self.tasks.count("inter_node", "reduce", ranks * nbytes)
        self.tasks.count("server_in", "reduce", nbytes)
        sent = self.tasks.add(f"push {unit.name}", "push", demands, after)
        self._pushes.append((sent, nbytes))
        title = f"push {unit.name} arrives"
        self._arrived = self.tasks.add(title, "land", {}, (sent,), self._hop_of(nbytes))
        read = STATE_BYTES * unit.trained
        written = read + nbytes
        self.tasks.count("server_disk", "optimizer", read + written)
        demands = {
            "server_disk": read / server.disk_read_bytes_per_s
            + written / server.disk_write_bytes_per_s,
            "server_cpu": unit.trained / server.adam_elements_per_s,
        }
        stepped = self.tasks.add(f"step {unit.name}", "optimizer", demands, (*after, *committed))
        self._applied[unit] = self.tasks.add(
            f"{unit.name} applied", "applied", {}, (self._arrived, stepped)
        )

    def _waited(self) -> list[int]:
        """Pushes that computation waits for: all but those within the window."""
        left = self._window
        for sent, nbytes in reversed(self._pushes):
            left -= nbytes
            if left < 0:
                return [sent]
        return []

    def _hop_of(self, nbytes: float) -> float:
        return self._hop * min(1.0, nbytes / self._workload.chunk_bytes)

    def _encrypted(self, nbytes: float) -> float:
        """Seconds of the emulated host's cores for a message to or from all workers.

        Each crosses one link to the server and one to each worker, of two ends.
        """
        if self._hardware.backend != "gloo":
            return 0.0
        return 2 * (self._hardware.world_size + 1) * _CURVE_BYTE_SECONDS * nbytes

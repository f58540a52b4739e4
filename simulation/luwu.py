"""LuWu's step: its bytes by link and direction, its server, its memory, its seconds.

As in ``baselines.luwu.plan``, layer 0 is what is outside of the blocks. A worker is a rank;
those of one node share its link, so that the node receives as often as it has ranks. The server's
bytes do not depend on the number of workers. No state of the model stays on a device.

The order of a step's tasks is that of ``baselines.luwu.train``. A layer's bytes cross the server's
link and a node's as a pipeline of chunks, each of which the switch passes on when it is whole. The
server reads, steps and writes a layer while its gradients arrive. What this leaves out: messages
that are not whole chunks, bursts that a limited link lets through, and files that share the disk's
time unevenly between reading ahead and stepping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baselines.luwu import LAYERS, WINDOW
from simulation.checks import Checked, Positive
from simulation.hardware import GB, LINK_EFFICIENCY, Hardware
from simulation.memory import Footprint, activations
from simulation.step.schedule import block_seconds
from simulation.step.tasks import Tasks, used
from simulation.workload import STATE_BYTES, Workload, head_work

#: The strategy's name.
LUWU = "luwu"
#: Forward and backward are each asked for by a message.
_PASSES = 2
#: A step reads one generation of the files and writes the other.
GENERATIONS = 2
#: Sequential rates of an NVMe drive, by the data sheet of the D7-P5510 (3.84 TB), of which the
#: server of LuWu's paper has twelve.
DRIVE_READ, DRIVE_WRITE = 6.5 * GB, 3.4 * GB
#: Steps before the one that counts, until each begins as the one before it did.
_BEFORE = 2
#: Seconds per byte that one end of CURVE takes of the emulated host: 14 ms of a core per megabyte
#: (docs/luwu.md), of two cores.
_CURVE_BYTE_SECONDS = 14e-9 / 2


@dataclass(frozen=True)
class Layer:
    """A layer by its parameters, and by bytes."""

    name: str
    trained: int
    frozen: int
    #: Bytes that a worker pulls of it; frozen ones may have been kept from an earlier step.
    pulled: float
    #: Bytes of its gradients, and of its parameters while a worker has it.
    pushed: float
    held: float


@dataclass(frozen=True)
class Traffic:
    """Bytes per step by link, as a record's ``link_bytes_per_step`` has them, and messages."""

    links: Mapping[str, float]
    #: Messages that the server receives.
    server_messages: int
    #: Messages that a worker sends, its acknowledgements among them.
    worker_messages: int


def layers_of(workload: Workload) -> list[Layer]:
    """Parameters outside of the blocks, then the blocks."""
    model, element = workload.model, float(workload.element_bytes)
    sizes = [("root", model.root_parameters, 0)]
    kinds = [(part.model.block_parameters, part.block_adapters) for part in workload.parts]
    sizes += [(f"block {index}", *kinds[kind]) for index, kind in enumerate(model.order)]
    layers = []
    for name, base, adapters in sizes:
        trained, frozen = (base, 0) if workload.lora is None else (adapters, base)
        pulled = element * (trained + (0 if workload.cached else frozen))
        held = element * (trained + frozen)
        layers.append(Layer(name, trained, frozen, pulled, element * trained, held))
    return layers


def passes(layers: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
    """Layers in the order in which forward and backward pull them."""
    root, *blocks = layers
    return [root, *blocks, root], blocks[::-1]


def traffic(workload: Workload, workers: int, ranks_per_node: int) -> Traffic:
    """The traffic of a steady step."""
    layers = layers_of(workload)
    forward, backward = passes(layers)
    pulled = [*forward, *backward]
    size = workload.chunk_bytes // workload.element_bytes
    # Messages; trained and frozen parameters do not share one.
    pushed, taken = (sum(-(-layer.trained // size) for layer in some) for some in (layers, pulled))
    if not workload.cached:
        taken += sum(-(-layer.frozen // size) for layer in pulled)
    received, sent = sum(layer.pulled for layer in pulled), sum(layer.pushed for layer in layers)
    state = STATE_BYTES * workload.trained
    return Traffic(
        {
            "node received": received * ranks_per_node,
            "node sent": sent * ranks_per_node,
            "server received": sent,
            "server sent": received,
            "server file_read": state + received,
            "server file_written": float(state + workload.element_bytes * workload.trained),
        },
        server_messages=pushed + taken * (1 if workload.merged else workers) + _PASSES,
        worker_messages=pushed + taken + _PASSES,
    )


def files_bytes(workload: Workload) -> float:
    """Bytes of the server's files: two generations of what is trained, and the frozen ones."""
    trained = GENERATIONS * (STATE_BYTES + workload.element_bytes) * workload.trained
    return float(trained + workload.element_bytes * workload.frozen)


@dataclass(frozen=True, kw_only=True)
class Server(Checked):
    """A machine beside the workers: rates that are reached. Its link is full duplex."""

    link_bytes_per_s: Positive
    disk_read_bytes_per_s: Positive
    disk_write_bytes_per_s: Positive
    #: Rate of AdamW on its CPUs.
    adam_elements_per_s: Positive
    #: Its description, in words.
    description: str


def like(hardware: Hardware) -> Server:
    """A server that has what a node has, as on an emulated cluster, but for drives of its own."""
    drives = hardware.server_drives
    return Server(
        link_bytes_per_s=hardware.inter_bytes_per_s,
        disk_read_bytes_per_s=drives * DRIVE_READ or hardware.disk_read_bytes_per_s,
        disk_write_bytes_per_s=drives * DRIVE_WRITE or hardware.disk_write_bytes_per_s,
        adam_elements_per_s=hardware.cpu_adam_elements_per_s,
        description=f"a server with {drives} NVMe drives" if drives else "a server like a node",
    )


def nominal(bits_per_s: float, drives: int, hardware: Hardware) -> Server:
    """A server by its nominal bandwidth and number of drives; it steps as a node's CPUs do."""
    link = LINK_EFFICIENCY * bits_per_s / 8
    return like(replace(hardware, inter_bytes_per_s=link, server_drives=drives))


def footprint(workload: Workload, hardware: Hardware) -> Footprint:
    """The most that a step takes, in backward: no state of the model stays on a device.

    Raises ``ValueError`` for what LuWu does not train: several micro-batches, packed weights.
    """
    if workload.accumulation != 1:
        raise ValueError(
            f"accumulation = {workload.accumulation}: allowed with luwu is 1, as each pass's "
            "gradients are pushed and applied"
        )
    if workload.packing is not None:
        raise ValueError(
            f"frozen_dtype = {workload.frozen_dtype!r}: luwu sends and computes in one type"
        )
    layers, element, tokens = layers_of(workload), workload.element_bytes, workload.tokens
    sizes = sorted((layer.held for layer in layers), reverse=True)
    # A layer's gradients are put together while they are there; the root's wait for backward's end.
    gradients = layers[0].pushed + LAYERS * max(layer.pushed for layer in layers)
    _, saved, recomputed, output = activations(workload)
    # With a block that is computed again there are gradients inside its MLP.
    in_block = recomputed + 3 * tokens * element * workload.model.inner
    device = {
        "gathered": sum(sizes[:LAYERS]),
        "gradients": gradients,
        "activations": saved + max(in_block, output),
    }
    host = {}
    if workload.cached and workload.frozen:
        host["cache"] = float(element * workload.frozen * hardware.ranks_per_node)
    forward = {name: device[name] for name in ("gathered", "activations")}
    return Footprint(device, forward, host, {})


def steps(workload: Workload, hardware: Hardware, server: Server) -> tuple[Tasks, int]:
    """Tasks of some steps, and the first task of the last step, which is a steady one."""
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
        self._layers = layers_of(workload)
        fastest = max(server.link_bytes_per_s, hardware.inter_bytes_per_s)
        #: Seconds that a chunk loses in the switch, which passes it on when it is whole: those
        #: on the faster link, as all chunks wait for the slower one anyway.
        self._hop = workload.chunk_bytes / fastest
        window = WINDOW * workload.chunk_bytes
        largest = max(layer.held for layer in self._layers)
        #: Layers that are pulled ahead of the one that computes: in memory, as chunks in flight.
        self._ahead = LAYERS + int(window // largest)
        #: Bytes of gradients that may be on their way while computation goes on.
        self._window = float(window)
        #: Computation by the layers that are pulled one after another.
        self._computed: list[int] = []
        #: Per layer: the task after which the server has applied its last gradients.
        self._applied: dict[Layer, int] = {}
        #: When the last gradients have arrived, whose sender then asks for the next forward.
        self._asked: tuple[int, ...] = ()
        #: This step's pushes and their bytes, and when the last of them has arrived.
        self._pushes: list[tuple[int, float]] = []
        self._arrived = 0

    def step(self) -> None:
        """Append one step's tasks."""
        workload, tokens = self._workload, self._workload.tokens
        root, *blocks = self._layers
        forward, backward = passes(self._layers)
        kinds = [block_seconds(part, self._hardware) for part in workload.parts]
        seconds = [kinds[kind] for kind in workload.model.order]
        head_forward, head_backward = head_work(workload)
        committed = tuple(self._applied.values())
        begin, turn = self._asked, self._asked
        self._pushes = []
        for place, layer in enumerate(forward):
            if layer is blocks[-1]:  # as it comes to the last block it asks for backward
                turn = tuple(self._computed[-1:])
            arrived = self._pull(layer, "forward", begin)
            if place == len(forward) - 1:
                work = (head_forward + head_backward) * tokens
                self._compute("head", self._hardware.seconds(work), arrived)
            else:
                block = seconds[place - 1][0] if place else 0.0
                self._compute(f"forward {layer.name}", block, arrived)
        for layer, (_, back) in zip(backward, reversed(seconds), strict=True):
            arrived = self._pull(layer, "backward", turn)
            self._compute(f"backward {layer.name}", back, (*arrived, *self._waited()))
            self._push(layer, committed)
        self._push(root, committed)
        # When the last gradients have arrived at the server; without any, the last computation.
        self._asked = (self._arrived if self._pushes else self._computed[-1],)

    def _compute(self, name: str, seconds: float, after: Sequence[int]) -> None:
        self._computed.append(self.tasks.compute(name, seconds, after))

    def _pull(self, layer: Layer, phase: str, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Send a layer once it is asked for, its update is applied, and memory has room."""
        nbytes = layer.pulled
        room = self._computed[-self._ahead :][:1] if len(self._computed) >= self._ahead else []
        applied = [self._applied[layer]] if layer in self._applied else []
        after = dict.fromkeys([*asked, *room, *applied])
        ranks = self._hardware.ranks_per_node
        demands = {
            "server_out": nbytes / self._server.link_bytes_per_s,
            "inter_node_in": ranks * nbytes / self._hardware.inter_bytes_per_s,
            "server_disk": nbytes / self._server.disk_read_bytes_per_s,
            "host_to_device": layer.held / self._hardware.host_to_device_bytes_per_s,
            "compute": self._encrypted(nbytes),
        }
        self.tasks.count("inter_node_in", phase, ranks * nbytes)
        self.tasks.count("server_out", phase, nbytes)
        title = f"{phase} pull {layer.name}"
        sent = self.tasks.add(title, "pull", used(demands), tuple(after))
        # Parameters pulled in pieces as large as a chunk arrive one piece later.
        return (self.tasks.add(f"{title} arrives", "arrive", {}, (sent,), self._hop_of(nbytes)),)

    def _push(self, layer: Layer, committed: tuple[int, ...]) -> None:
        """Send a layer's gradients, and apply them."""
        server = self._server
        nbytes = layer.pushed
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
        sent = self.tasks.add(f"push {layer.name}", "push", used(demands), after)
        self._pushes.append((sent, nbytes))
        title = f"push {layer.name} arrives"
        self._arrived = self.tasks.add(title, "land", {}, (sent,), self._hop_of(nbytes))
        read = STATE_BYTES * layer.trained
        written = read + nbytes
        self.tasks.count("server_disk", "optimizer", read + written)
        demands = {
            "server_disk": read / server.disk_read_bytes_per_s
            + written / server.disk_write_bytes_per_s,
            "server_cpu": layer.trained / server.adam_elements_per_s,
        }
        begins = (*after, *committed)
        stepped = self.tasks.add(f"step {layer.name}", "optimizer", used(demands), begins)
        self._applied[layer] = self.tasks.add(
            f"{layer.name} applied", "applied", {}, (self._arrived, stepped)
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

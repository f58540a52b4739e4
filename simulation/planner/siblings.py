"""Other papers' systems beside a plan: LuWu where there is a server, Fuyou on one GPU.

LuWu is simulated by ``simulation.luwu``: a switch that sums and multicasts is assumed,
and each GPU is a worker, so that those of one node share its link. Fuyou is modelled, not
simulated: a pass takes as long as the busiest of the device, its link, the SSDs and the CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from baselines.fuyou import cost
from baselines.fuyou.cost import Item, Rates, Work
from baselines.settings import FuyouSettings
from simulation.hardware import Hardware
from simulation.luwu import GENERATIONS, LUWU, Server, files_bytes
from simulation.planner.request import Request
from simulation.prediction import Prediction, fits, largest_micro_batch, predict
from simulation.workload import (
    FP32,
    STATE_BYTES,
    Workload,
    block_bytes,
    block_work,
    checkpointed_bytes,
    head_work,
    loss_bytes,
)

#: Buffers in host memory of ``delayed``: of states, of gradients, of activations that go to SSD.
_STATES, _GRADIENTS, _PASSING = 3, 2, 3
_SLOTS = FuyouSettings().blocks_on_device
#: Sequences of a step that are tried, and how close to the fastest the fewest must come.
_BATCHES = tuple(2**power for power in range(11))
_CLOSE = 0.95


@dataclass(frozen=True)
class InNetwork:
    """A step of LuWu."""

    workload: Workload
    prediction: Prediction
    server: Server

    def __str__(self) -> str:
        step = self.document()
        waits = WAITS.get(self.prediction.bottleneck, self.prediction.bottleneck)
        host = step["host_bytes"] / 1e9
        cache = f", {host:,.1f} GB of host memory a node" if host else ""
        return (
            f"{LUWU}, whose model lies on {step['server']}: {step['seconds']:.3g} s per step of "
            f"{step['sequences']} × {step['length']} tokens a GPU "
            f"({step['tokens_per_s']:,.0f} tokens/s, waits for {waits}); a node receives "
            f"{step['node_received'] / 1e9:,.3g} GB and sends {step['node_sent'] / 1e9:,.3g}, the "
            f"server receives {step['server_received'] / 1e9:,.3g} and sends "
            f"{step['server_sent'] / 1e9:,.3g}; needs {step['device_bytes'] / 1e9:.1f} GB on each "
            f"device{cache}, {step['files_bytes'] / 1e9:,.0f} GB of files on the server, and a "
            "switch that sums and multicasts"
        )

    def document(self) -> dict[str, Any]:
        """Form for JSON: sizes in bytes, of links per step and by direction, times in seconds."""
        workload, prediction = self.workload, self.prediction
        links = prediction.link_bytes or {}
        return {
            "sequences": workload.micro_batch,
            "length": workload.sequence_length,
            "recomputed": workload.recomputed,
            "cached": workload.cached,
            "seconds": prediction.step_seconds,
            "tokens_per_s": prediction.tokens_per_s,
            "bottleneck": prediction.bottleneck,
            "node_received": links["node received"],
            "node_sent": links["node sent"],
            "server_received": links["server received"],
            "server_sent": links["server sent"],
            "device_bytes": prediction.footprint.device_bytes,
            "host_bytes": prediction.footprint.host_bytes,
            "files_bytes": files_bytes(workload),
            "server": self.server.description,
        }


#: Words for what a step waits for.
WAITS = {
    "compute": "computation",
    "inter_node": "what nodes send",
    "inter_node_in": "what nodes receive",
    "server_in": "what the server receives",
    "server_out": "what the server sends",
    "server_disk": "the server's drives",
    "server_cpu": "the server's optimizer",
    "host_to_device": "copies from the host",
    "device_to_host": "copies to the host",
}


def in_network(request: Request) -> InNetwork | None:
    """The fastest step of LuWu with the request's server; ``None`` without one, or if none fits.

    A step has one micro-batch, the largest that fits unless the request says its size.
    """
    server, hardware = request.server, request.hardware
    if server is None or request.packed:
        return None
    steps = [InNetwork(p, predict(p, hardware, server), server) for p in _fitting(request)]
    return max(steps, key=lambda made: made.prediction.tokens_per_s, default=None)


def lack(request: Request) -> str:
    """Say why ``in_network`` has no step for a request with a server, in one sentence."""
    if request.packed:
        return f"luwu does not hold frozen parameters in {request.frozen_dtype}"
    sizes = _sizes(request)
    of = f"{' or '.join(map(str, sizes))} sequences" if sizes else "one sequence"
    return f"luwu does not fit: two layers and the activations of {of} are too much"


def _sizes(request: Request) -> tuple[int, ...]:
    """Micro-batches to try: those named, or all sequences of a rank's step; none: any."""
    whole = request.sequences_per_rank(request.sequence_lengths[0])
    return request.micro_batches if whole is None else (whole,)


def _fitting(request: Request) -> Iterator[Workload]:
    """The points of LuWu that fit."""
    hardware = request.hardware
    points = (replace(one, strategy=LUWU, policy="host") for one in request.workloads())
    for point in dict.fromkeys(points):
        for cached in (False,) if request.lora_rank is None else (True, False):
            tried = replace(point, cached=cached)
            for size in _sizes(request) or (largest_micro_batch(tried, hardware),):
                if size and fits(replace(tried, micro_batch=size), hardware):
                    yield replace(tried, micro_batch=size)


@dataclass(frozen=True)
class OutOfCore:
    """A step with all state on SSD."""

    sequences: int
    length: int
    seconds: float
    tokens_per_s: float
    ssd_bytes: float

    def __str__(self) -> str:
        return (
            f"fuyou, which keeps all state on SSD: {self.seconds:.3g} s per step of "
            f"{self.sequences} × {self.length} tokens ({self.tokens_per_s:,.0f} tokens/s), "
            f"{self.ssd_bytes / 1e9:,.0f} GB of SSD (modelled, not simulated)"
        )


def out_of_core(request: Request) -> OutOfCore | None:
    """The fewest sequences per step that are nearly as fast as any; ``None`` if it does not fit.

    Fuyou is for one device, and computes in the dtype of frozen parameters.
    """
    hardware = request.hardware
    if hardware.world_size > 1 or request.packed:
        return None
    return next(filter(None, map(_best, (request, *request.shorter()))), None)


def _best(request: Request) -> OutOfCore | None:
    sizes = sorted(_sizes(request) or _BATCHES)
    alike = (
        replace(one, strategy="fsdp2", policy="host", recomputed=1.0, checkpointing="full")
        for one in request.workloads()
    )
    points = [replace(one, micro_batch=n) for one in dict.fromkeys(alike) for n in sizes]
    steps = [made for one in points if (made := _fuyou(one, request.hardware)) is not None]
    fastest = max((made.tokens_per_s for made in steps), default=0.0)
    return next((made for made in steps if made.tokens_per_s >= _CLOSE * fastest), None)


def _fuyou(workload: Workload, hardware: Hardware) -> OutOfCore | None:
    dram = hardware.host_memory_bytes - _taken(workload)
    if dram < 0 or _device_bytes(workload) > hardware.usable_device_bytes:
        return None
    work = _work(workload)
    curve = cost.curve(work, _rates(workload, hardware, dram))
    moved, seconds = min(curve, key=lambda point: point[1])
    swapped = max(0.0, work.between + moved - dram)
    state = (STATE_BYTES + workload.element_bytes) * workload.trained * GENERATIONS
    return OutOfCore(
        workload.micro_batch,
        workload.sequence_length,
        seconds,
        workload.tokens / seconds,
        state + workload.element_bytes * workload.frozen + swapped,
    )


def _work(workload: Workload) -> Work:
    model, tokens = workload.model, workload.tokens
    blocks = workload.total(lambda each: block_work(each)[0].flops) * tokens
    items = tuple(
        Item(
            workload.element_bytes * matrix.active * matrix.outputs * tokens,
            2.0 * matrix.active_weights * tokens,
        )
        for kind in model.order
        for matrix in workload.parts[kind].model.matrices
    )
    return Work(
        flops=blocks + model.head_flops * tokens,
        recomputed=blocks,
        parameters=(workload.parameters - model.root_parameters) * workload.element_bytes,
        gradients=workload.element_bytes * workload.trained,
        state_read=STATE_BYTES * workload.trained,
        state_written=(STATE_BYTES + workload.element_bytes) * workload.trained,
        between=workload.total(checkpointed_bytes) * tokens,
        items=items,
    )


def _rates(workload: Workload, hardware: Hardware, dram: float) -> Rates:
    forward = workload.total(lambda each: block_work(each)[0]) + head_work(workload)[0]
    return Rates(
        flops=forward.flops / hardware.seconds(forward),
        link=min(hardware.host_to_device_bytes_per_s, hardware.device_to_host_bytes_per_s),
        read=hardware.disk_read_bytes_per_s,
        write=hardware.disk_write_bytes_per_s,
        adam=workload.trained / hardware.cpu_adam_elements_per_s,
        dram=dram,
        keeps_parameters=True,
    )


def _taken(workload: Workload) -> float:
    """Host memory of buffers, which is not left for activations."""
    of_root = max(rows * row for rows, row in workload.model.root_rows)
    largest = max(workload.block_parameters, of_root)
    trained = largest if workload.lora is None else workload.block_adapters
    state = (STATE_BYTES + workload.element_bytes) * trained
    moved = max(matrix.active * matrix.outputs for matrix in workload.model.matrices)
    return (
        _STATES * state
        + _GRADIENTS * FP32 * trained
        + _SLOTS * workload.element_bytes * largest
        + _PASSING * workload.element_bytes * moved * workload.tokens
    )


def _device_bytes(workload: Workload) -> float:
    """Memory of the root, of the blocks that are there at once, and of the fullest moment."""
    model, element = workload.model, workload.element_bytes
    root, block = model.root_parameters, workload.block_parameters
    full = workload.lora is None
    parameters = element * (root + _SLOTS * block)
    gradients = element * (root + block if full else workload.block_adapters)
    one_block = max(map(block_bytes, workload.parts))
    loss = loss_bytes(workload) * model.vocabulary
    return parameters + gradients + max(one_block, loss) * workload.tokens

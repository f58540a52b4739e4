"""The simulator's answer: one step's time, bytes, memory, and what it waits for."""

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from simulation import luwu
from simulation.hardware import Gpu, Hardware
from simulation.luwu import Server, like
from simulation.memory import Footprint, Tiers, footprint, place
from simulation.pipeline import Pipeline
from simulation.step.pipeline import Stages, work_of
from simulation.step.schedule import Step
from simulation.step.slots import Slots, turns
from simulation.step.tasks import Tasks, Timeline
from simulation.units import Layout, layout
from simulation.workload import Workload, token_work

_MICROSECONDS = 1e6
#: Footprints in the cache: a plan asks for that of a point again and again.
_REMEMBERED = 4096


@dataclass(frozen=True)
class Prediction:
    """One steady step, simulated: all caches hold what the step before has left in them."""

    #: ``oom`` if device or host memory is too small; the rest is then as if it were enough.
    state: Literal["ok", "oom"]
    error: str | None
    step_seconds: float
    #: Tokens per second of the whole cluster.
    tokens_per_s: float
    #: Model FLOPS utilisation (frozen weights count 4, trained ones 6), and with recomputation.
    mfu: float
    hfu: float
    #: Names of the tasks that followed one another without a gap.
    critical_path: tuple[str, ...]
    #: Share of the step that each resource was in full use. PCIe counts for both of its directions
    #: what the network and the exchanges inside the node use of it.
    busy: Mapping[str, float]
    #: Bytes that one node moves by link (inter_node, intra_node, host_to_device, device_to_host,
    #: disk) and phase (forward, backward, reduce, optimizer), as a record's ledger has them.
    moved_bytes: Mapping[str, Mapping[str, float]]
    footprint: Footprint
    timeline: Timeline
    #: Bytes by link and direction of a strategy with a server, and messages to the server.
    link_bytes: Mapping[str, float] | None = None
    server_messages: int | None = None

    @property
    def inter_node_bytes(self) -> float:
        """Bytes per step that one node sends to others."""
        return sum(self.moved_bytes.get("inter_node", {}).values())

    @property
    def bottleneck(self) -> str:
        """The resource in use most."""
        return max(self.busy, key=lambda resource: self.busy[resource])


@lru_cache(maxsize=_REMEMBERED)
def needed(workload: Workload, hardware: Hardware) -> Footprint:
    """The peak memory, with the cache where the policy puts it; raises as ``predict``."""
    if workload.served:
        return luwu.footprint(workload, hardware)
    if workload.schedule.cut:
        return Pipeline.of(workload, hardware).footprint()
    return _placed(workload, hardware)[2]


def _placed(workload: Workload, hardware: Hardware) -> tuple[Layout, Tiers, Footprint]:
    """The units, where their entries are kept, and the memory that all of it takes."""
    units = layout(workload, *hardware.shape)
    tiers, cache = place(workload, units, hardware)
    return units, tiers, footprint(workload, units, hardware, cache)


def fits(workload: Workload, hardware: Hardware) -> bool:
    """Whether the workload's device and host memory suffice; raises as ``predict``."""
    return needed(workload, hardware).lacks(hardware).fits


def largest_micro_batch(workload: Workload, hardware: Hardware) -> int:
    """Most sequences per rank and micro-batch that fit; 0 if not even one does."""

    def fitting(micro_batch: int) -> bool:
        return fits(workload.changed(micro_batch=micro_batch), hardware)

    least = 1  # that may not fit
    while fitting(least):
        least *= 2
    return bisect(range(least), False, lo=least // 2 + 1, key=lambda size: not fitting(size)) - 1


def utilisations(workload: Workload, gpu: Gpu, tokens_per_gpu_s: float) -> tuple[float, float]:
    """MFU and HFU: shares of the GPU's peak, by the model's operations and by all.

    ``tokens_per_gpu_s`` are tokens per second and GPU.
    """
    useful, total = (token_work(one).flops for one in (workload.changed(recomputed=0.0), workload))
    return (useful * tokens_per_gpu_s / gpu.peak_flops, total * tokens_per_gpu_s / gpu.peak_flops)


@dataclass(frozen=True)
class Built:
    """One steady step before it is simulated: what it needs, and its tasks."""

    workload: Workload
    hardware: Hardware
    needs: Footprint
    tasks: Tasks
    #: The first task of the steady step; those before it are of earlier steps.
    begin: int = 0


def build(workload: Workload, hardware: Hardware, server: Server | None = None) -> Built:
    """The workload's step on this hardware; raises as ``predict``."""
    if hardware.backend == "nccl" and workload.element_bytes != 2:
        raise ValueError(
            "dtype = 'float32': a simulated GPU computes in bfloat16; allowed: bfloat16"
        )
    if workload.served:
        needs = luwu.footprint(workload, hardware)
        steps = luwu.steps(workload, hardware, server or like(hardware))
        return Built(workload, hardware, needs, *steps)
    schedule = workload.schedule
    if schedule.cut:
        stages = Stages(work_of(Pipeline.of(workload, hardware)))
        return Built(workload, hardware, needed(workload, hardware), stages)
    units, tiers, needs = _placed(workload, hardware)
    if schedule.passes_on:  # ranks go two slots apart,
        return Built(workload, hardware, needs, Slots(hardware, workload=workload))
    if schedule.cycle == "turns":  # or take turns,
        return Built(workload, hardware, needs, turns(workload, hardware))
    # or do the same at once.
    step = Step(workload, units, tiers, hardware, sums_on_host="gradient sums" in needs.host)
    return Built(workload, hardware, needs, step.build())


def predict(workload: Workload, hardware: Hardware, server: Server | None = None) -> Prediction:
    """Simulate one steady step; LuWu's server is as a node where no other is given.

    Raises ``ValueError`` for a strategy that does not exist or is not simulated yet, for a policy
    or codec that does not exist, and for fp32 on GPUs, whose rates are those of bf16.
    """
    return simulate_built(build(workload, hardware, server))


def simulate_built(built: Built) -> Prediction:
    """Simulate a step that was built."""
    workload, hardware, tasks = built.workload, built.hardware, built.tasks
    timeline = tasks.timeline().since(built.begin)
    shortage = built.needs.shortage(hardware)
    tokens = workload.tokens * workload.accumulation
    per_gpu = tokens / timeline.seconds
    mfu, hfu = utilisations(workload, hardware.device, per_gpu)
    served = None
    if workload.served:
        served = luwu.traffic(workload, hardware.world_size, hardware.ranks_per_node)
    return Prediction(
        state="ok" if shortage is None else "oom",
        error=shortage,
        step_seconds=timeline.seconds,
        tokens_per_s=per_gpu * hardware.world_size,
        mfu=mfu,
        hfu=hfu,
        critical_path=tuple(timeline.tasks[index].name for index in timeline.critical_path),
        busy={
            name: used / timeline.seconds for name, used in sorted(timeline.busy_seconds().items())
        },
        moved_bytes=tasks.moved_bytes,
        footprint=built.needs,
        timeline=timeline,
        link_bytes=None if served is None else served.links,
        server_messages=None if served is None else served.server_messages,
    )


def chrome_trace(prediction: Prediction) -> dict[str, Any]:
    """The step in the Trace Event Format: a row per stream, the critical path marked."""
    timeline = prediction.timeline
    streams = list(dict.fromkeys(task.stream for task in timeline.tasks))
    critical = set(timeline.critical_path)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": stream}}
        for row, stream in enumerate(streams)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": streams.index(task.stream),
            "name": task.name,
            "cat": "critical" if index in critical else "other",
            "ts": span.start * _MICROSECONDS,
            "dur": (span.end - span.start) * _MICROSECONDS,
            "args": {f"{name}_seconds": used for name, used in task.demands.items()},
        }
        for index, (task, span) in enumerate(zip(timeline.tasks, timeline.spans, strict=True))
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"evidence": "simulated"}}

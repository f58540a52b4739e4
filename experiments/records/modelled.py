"""Cells and their records in the terms of ``simulation``."""

from dataclasses import fields

from baselines import registry
from experiments.records import allowed
from experiments.records.cell import AnyCluster, Cell, FrozenDType
from experiments.records.record import Record
from simulation.emulated import BY_CORES, Constants, MeasuredStep, emulated
from simulation.hardware import GB, Hardware, cluster, gpu_of
from simulation.prediction import utilisations
from simulation.workload import FrozenDtype, Workload

#: The settings of strategies that a simulation knows.
_SIMULATED = frozenset(field.name for field in fields(Workload)) & {*registry.setting_names()}
#: Names there of what frozen parameters are held in.
_FROZEN: dict[FrozenDType, FrozenDtype] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float8": "fp8",
    "nf4": "nf4",
    "bnb-4bit": "bnb-4bit",
}
#: Bits a second for a cell without a limit: no link between nodes is faster today.
_UNLIMITED = 1e15


def workload_of(cell: Cell) -> Workload:
    """A cell's workload. Raises ``ValueError`` for a model whose shape is not known."""
    model = allowed.shape_of(cell)
    return Workload(
        strategy=cell.strategy,
        model=model,
        lora=model.lora(cell.lora_rank) if cell.tuning == "lora" else None,
        sequence_length=cell.sequence_length,
        micro_batch=cell.micro_batch,
        accumulation=cell.accumulation,
        element_bytes=2 if cell.dtype == "bfloat16" else 4,
        recomputed=cell.recomputed,
        frozen_dtype=_FROZEN[cell.frozen_dtype],
        product_dtype="fp8" if cell.frozen_dtype == "float8" else "bf16",
        learning_rate=cell.learning_rate,
        **{name: value for name, value in cell.settings if name in _SIMULATED},
    )


def hardware_of(
    spec: AnyCluster, inter_bits_per_s: float | None, constants: Constants | None = None
) -> Hardware:
    """Assumptions of a simulation on a cluster whose nodes send this many bits a second.

    ``constants`` are of the host of an emulated one; by default of the committed records'.
    """
    if spec.kind != "simulated":
        constants = constants or BY_CORES[spec.cores]
        shape = spec.nodes, spec.ranks_per_node
        return emulated(*shape, inter_bits_per_s, constants, cores=spec.cores)
    return cluster(
        spec.gpu,
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node,
        inter_bits_per_s=_UNLIMITED if inter_bits_per_s is None else inter_bits_per_s,
        host_memory_bytes=spec.host_memory_gb * GB,
        matmul_efficiency=spec.matmul_efficiency,
        link_efficiency=spec.link_efficiency,
        inter_efficiency=spec.inter_efficiency,
        inter_latency_seconds=spec.inter_latency_us / 1e6,
        server_drives=spec.server_drives,
    )


def cluster_of(cell: Cell, constants: Constants | None = None) -> Hardware:
    """Assumptions of a simulation on the cluster that the cell runs on, as ``hardware_of``."""
    return hardware_of(cell.cluster, cell.inter_bandwidth_bits_per_s, constants)


def measured_mfu(record: Record) -> float | None:
    """Model FLOPS utilisation of a cell that ran on GPUs, of their data sheet's bf16 peak.

    Emulated nodes share the machine's GPUs: it is the share of these that all ranks together reach.
    ``None`` where no such peak is known: on CPUs, on other GPUs or unlike ones, in fp32, and of
    models whose operations are not counted.
    """
    models, speed = str(record.hardware.get("gpu", "")).split(", "), record.tokens_per_s
    gpu = gpu_of(models[0]) if len(models) == 1 else None
    if gpu is None or speed is None or record.cell.dtype != "bfloat16":
        return None
    try:
        workload = workload_of(record.cell)
    except ValueError:
        return None
    cluster = record.cell.cluster
    gpus = cluster.nodes * cluster.ranks_per_node
    if record.evidence == "emulated":  # ranks of one place in their nodes have the same one
        gpus = min(cluster.ranks_per_node, int(record.hardware["gpus"]))
    mfu, _ = utilisations(workload, gpu, speed / gpus)
    return mfu


def measured_step(record: Record, hardware: Hardware) -> MeasuredStep | None:
    """The step of a record's cell, which ran on ``hardware``; ``None`` if it did not run."""
    seconds, measured = record.step_seconds_median, record.measurement
    if seconds is None or measured is None:
        return None
    sent = measured.inter_node_bytes_per_step
    return MeasuredStep(workload_of(record.cell), hardware, seconds, sent)


def framed(cell: Cell) -> tuple[Workload, int, int]:
    """The cell's workload, nodes and ranks per node, as ``simulation.framing`` takes them."""
    return workload_of(cell), cell.cluster.nodes, cell.cluster.ranks_per_node

"""Record of a cell's run: one ``Record``, one line of a JSON Lines file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field

from experiments.records.abilities import Evidence
from experiments.records.cell import Cell
from simulation import files
from simulation.files import Strict

#: Limits above which a machine is busy: load per core, and share of the processors' time.
_BUSY_LOAD, _BUSY_STEAL = 0.5, 0.05

State = Literal["ok", "oom", "failed", "timeout", "skipped"]


@dataclass(frozen=True)
class Metric:
    """How a measured number is shown in the report's table and the terminal's, and to claims.

    A field of ``Measurement`` that has one is a column of the tables wherever a cell has a value,
    and a quantity of that name for claims.
    """

    #: Heading of the column, with its unit.
    title: str
    #: Factor that the number is multiplied by, and the format of the product.
    scale: float = 1.0
    form: str = ".4g"
    unit: str = ""
    #: The two lines above its column in the terminal's narrow table; ``None``: it has no column.
    brief: tuple[str, str] | None = None

    def written(self, value: float) -> str:
        """The number as tables have it."""
        return f"{value * self.scale:{self.form}}{self.unit}"


class Simulation(Strict):
    """Where a simulated step's time and memory go."""

    #: Model FLOPS utilisation (a frozen weight counts 4, a trained one 6), and with recomputation.
    mfu: float
    hfu: float
    #: The resource in use most, and the share of the step for which each is fully used.
    bottleneck: str
    busy: dict[str, float]
    #: Seconds of the critical path, whose tasks follow one another without a gap, by stream.
    critical_seconds: dict[str, float]
    #: By part: one rank's device, one node's host.
    device_bytes: dict[str, float]
    host_bytes: dict[str, float]


class Cached(Strict):
    """Work and content of one rank's cache: the mean of counts over ranks, the largest of bytes."""

    #: Gathers a step: served from the cache, and across nodes.
    hits_per_step: float
    misses_per_step: float
    #: Entries and their bytes after the last step, by the tier that they are in.
    entries: dict[str, float]
    entry_bytes: dict[str, int]
    #: Memory taken for entries: of the device, and of the host, page-locked on CUDA.
    device_bytes: int
    host_bytes: int


class Measurement(Strict):
    """Figures of the ranks of one cell over the steps after warm-up; rank 0 writes it."""

    engine: str
    engine_version: str
    policy: str | None
    parameters: int
    trainable_parameters: int
    #: Seconds of each measured optimizer step, the slowest rank's.
    step_seconds: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    #: Mean loss over ranks and micro-batches, one a step, warm-up included.
    losses: list[float]
    #: Egress of the busiest node a step, from the kernel's counters, in bytes; and what of it goes
    #: to other groups of nodes, where there are several.
    inter_node_bytes_per_step: float
    inter_group_bytes_per_step: float | None = None
    #: Least bytes a step that the strategy's schedule must send from a node; ``None`` if unknown.
    inter_node_bytes_closed_form: float | None
    #: Bytes a step of one node by link and phase, from the strategy's own ledger if it keeps one.
    ledger_bytes_per_step: dict[str, dict[str, float]] | None
    #: The dtype that gradients were reduced in, by that ledger; ``None`` in older records.
    reduce_dtype: str | None = None
    #: Resident set of the largest rank process at its peak, in bytes; in older records while the
    #: model was built, too.
    peak_host_bytes: int
    #: Host cache of one rank, in bytes; page-locked on CUDA.
    host_cache_bytes: int | None
    peak_device_bytes: int | None
    #: Steps after which ranks were restarted from a checkpoint. Each step is counted once; time
    #: and bytes of checkpoints are not.
    resumed_at: list[int] = Field(default=[])
    #: Optimizer steps from one exchange between workers to the next.
    steps_per_round: int = 1
    #: Where workers train apart, means over the outer updates: what late displacements were divided
    #: by, how far workers are from their mean relative to how far they went, and the share of the
    #: outer momentum's elements that were clipped.
    staleness_gap: Annotated[float | None, Metric("staleness gap Λ")] = None
    worker_drift: Annotated[float | None, Metric("drift of workers", 100, ".3g", " %")] = None
    clipped_fraction: Annotated[float | None, Metric("clipped", 100, ".3g", " %")] = None
    #: Micro-batches of a step that go through a pipeline, and the share of a step that a
    #: node would wait were messages free and all stages of one cost.
    pipeline_micro_batches: Annotated[int | None, Metric("micro-batches in the pipeline")] = None
    pipeline_bubble: Annotated[float | None, Metric("bubble", 100, ".3g", " %")] = None
    #: Bytes that a rank of cyclic strategies sends at most in each slot of a step, forwards before
    #: backwards.
    bytes_by_slot: list[float] | None = None
    #: Bytes that autograd keeps for backward, at most, in each slot of a step, where micro-batches
    #: take turns on one device; and what all micro-batches of a step at once would keep.
    activation_bytes_by_slot: list[float] | None = None
    activation_bytes_together: float | None = None
    #: Where a server has the parameters: bytes per step of the busiest node's link and of the
    #: server's, received and sent, by the kernel's counters; of its files, read and written; and
    #: the messages that it receives.
    link_bytes_per_step: dict[str, float] | None = None
    server_messages_per_step: Annotated[float | None, Metric("messages to the server")] = None
    #: Host memory of one rank's outer state and snapshot where they lie there, in bytes;
    #: page-locked on CUDA.
    outer_host_bytes: int | None = None
    #: Out-of-core training, per step: bytes of activations that leave the device, and of them
    #: those on SSD; bytes that are read from SSD and written. The most host memory that it used;
    #: bytes of products that are kept instead of computed again, what its cost model makes of a
    #: step with them, blocks whose parameters stay in host memory, and buffers of optimizer state.
    kept_bytes: Annotated[float | None, Metric("activations swapped MB", 1e-6)] = None
    kept_on_ssd_bytes: Annotated[float | None, Metric("of these on SSD MB", 1e-6)] = None
    ssd_read_bytes: Annotated[float | None, Metric("SSD read MB/step", 1e-6)] = None
    ssd_written_bytes: Annotated[float | None, Metric("SSD written MB/step", 1e-6)] = None
    dram_peak_bytes: Annotated[int | None, Metric("DRAM at most MB", 1e-6)] = None
    chosen_bytes: float | None = None
    modelled_seconds: Annotated[float | None, Metric("modelled s/step")] = None
    blocks_in_dram: int | None = None
    state_buffers: int | None = None
    #: Mean loss of the cell's held-out examples after the last step, and of images the share that
    #: are classified right; ``None`` without any.
    held_out_loss: Annotated[
        float | None, Metric("held-out loss", form=".4f", brief=("held out", "loss"))
    ] = None
    #: The same loss by the steps before it, the last after all; ``None`` if evaluated only then.
    held_out_losses: dict[int, float] | None = None
    held_out_accuracy: Annotated[
        float | None, Metric("held-out accuracy", 100, ".2f", " %", brief=("right", "%"))
    ] = None
    #: Cache of strategies that have one; ``None`` in the oldest records.
    cache: Cached | None = None
    #: Seconds a step of forward, backward with its reductions, and the optimizer, the mean over
    #: ranks; ``None`` on accelerators, whose host does not wait, and in older records.
    phase_seconds: dict[str, float] | None = None
    #: Means per iteration by phase, of objectives that prepare before they update: bytes of the
    #: busiest node by the kernel's counters, and seconds of the slowest rank; and the mean reward
    #: of each iteration, warm-up included, and over those that are measured.
    sync_bytes: Annotated[float | None, Metric("weight sync MB", 1e-6)] = None
    generation_bytes: Annotated[float | None, Metric("generation MB", 1e-6)] = None
    scoring_bytes: Annotated[float | None, Metric("log-probabilities MB", 1e-6)] = None
    update_bytes: Annotated[float | None, Metric("update MB", 1e-6)] = None
    sync_seconds: Annotated[float | None, Metric("weight sync s")] = None
    generation_seconds: Annotated[float | None, Metric("generation s")] = None
    scoring_seconds: Annotated[float | None, Metric("log-probabilities s")] = None
    update_seconds: Annotated[float | None, Metric("update s")] = None
    rewards: list[float] | None = None
    reward: Annotated[float | None, Metric("reward", form=".4f", brief=("mean", "reward"))] = None
    #: The most bytes that a rank's tensors take in the last iteration of warm-up, where the CPU is
    #: the device: shards and optimizer states among them, and not what waits in host memory.
    iteration_device_bytes: Annotated[int | None, Metric("device memory MB", 1e-6)] = None
    #: Where a rollout generates, means per iteration: versions that its answers are behind, the
    #: share of the followed words that a version changes, and bits per word that encode it.
    versions_behind: Annotated[float | None, Metric("versions behind")] = None
    changed_share: Annotated[float | None, Metric("words changed", 100, ".3g", " %")] = None
    bits_per_parameter: Annotated[float | None, Metric("bits per parameter", form=".3f")] = None
    #: Figures that only a simulation knows.
    simulation: Simulation | None = None

    @property
    def round_seconds(self) -> list[float]:
        """Seconds per step of each whole round; of each step where all steps are alike.

        One step of a round waits for what the others do not, so that the median of steps is not
        their pace. Of less than a round it is the mean of what there is.
        """
        size, steps = min(self.steps_per_round, len(self.step_seconds)), self.in_whole_rounds
        return [sum(steps[at : at + size]) / size for at in range(0, len(steps), size)]

    @property
    def in_whole_rounds(self) -> list[float]:
        """Seconds of each step, without those of an incomplete last round."""
        over = len(self.step_seconds) % self.steps_per_round
        return self.step_seconds[: len(self.step_seconds) - over] or self.step_seconds


#: Metrics that readers see beside those of all tables, by the names of a measurement's fields.
METRICS: Mapping[str, Metric] = {
    name: metric
    for name, field in Measurement.model_fields.items()
    for metric in field.metadata
    if isinstance(metric, Metric)
}


class Machine(Strict):
    """How busy with others' work the machine was that started the ranks."""

    #: Load average over a minute, before the run's first cell, and the cores that share it.
    load: float
    cores: int
    #: Share of the processors' time that the machine's own host took while the cell ran.
    steal_share: float

    @property
    def why_busy(self) -> str | None:
        """Load of others on the machine, in words; ``None`` if it is quiet."""
        reasons = []
        if self.load > _BUSY_LOAD * self.cores:
            reasons.append(f"a load of {self.load:.1f} on {self.cores} cores")
        if self.steal_share > _BUSY_STEAL:
            reasons.append(f"{self.steal_share:.0%} of the processors' time taken by its host")
        return " and ".join(reasons) or None


class Record(Strict):
    """One finished cell: settings, outcome, figures, and where they come from."""

    cell: Cell
    cell_id: str
    state: State
    error: str | None
    evidence: Evidence
    measurement: Measurement | None
    commit: str | None
    versions: dict[str, str]
    hardware: dict[str, Any]
    #: ``None`` where nothing was run, and in older records.
    machine: Machine | None = None
    #: Settings of the shaper (rate, burst, MTU), as the cluster reports it.
    network: dict[str, Any]
    started_at: str
    seconds: float

    @property
    def cores_per_node(self) -> int | None:
        """Cores that each node had of its own; ``None`` where nodes shared them, or none ran."""
        own = getattr(self.cell.cluster, "cores", None) == "own"
        return self.machine.cores // self.cell.cluster.nodes if own and self.machine else None

    @property
    def step_seconds_median(self) -> float | None:
        """Median of the measured steps in seconds; see :attr:`Measurement.round_seconds`."""
        return None if self.measurement is None else median(self.measurement.round_seconds)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of the whole cluster, from the median step."""
        seconds = self.step_seconds_median
        return None if seconds is None else self.cell.tokens_per_step / seconds


def read(path: Path) -> list[Record]:
    """Read a JSON Lines file of records; see ``simulation.files.read_as``.

    Files may be anybody's, and folders are named by ids in them. Raises ``ValueError`` with file
    and line for an id that is not its cell's, and for a cell that has a record already.
    """
    records = files.read_as(path, Record)
    lines: dict[tuple[str, str], int] = {}
    for number, record in enumerate(records, start=1):
        if record.cell_id != record.cell.id:
            raise ValueError(
                f"{path}:{number}: cell_id = {record.cell_id[:80]!r}: must be its cell's, "
                f"{record.cell.id!r}"
            )
        first = lines.setdefault((record.cell_id, record.evidence), number)
        if first != number:
            raise ValueError(
                f"{path}:{number}: {record.cell_id} has a record already, in line {first}; each "
                "cell has one"
            )
    return records

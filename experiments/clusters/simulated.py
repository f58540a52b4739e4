"""A cluster that need not exist: the simulator predicts its cells, in this process."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from baselines import registry
from experiments.clusters import start_barrier
from experiments.clusters.interface import Cluster, ClusterError, Launch, Outcome
from experiments.records.abilities import ABILITIES
from experiments.records.cell import AnyCluster, Cell
from experiments.records.modelled import cluster_of, hardware_of, workload_of
from experiments.records.record import Measurement, Simulation
from simulation import cycle, prediction
from simulation.hardware import Hardware
from simulation.prediction import Prediction, predict
from simulation.workload import Workload


class SimulatedCluster(Cluster):
    """A cluster without processes.

    A cluster of kind ``emulated`` is simulated as the host that the committed records were
    measured on. Raises ``ClusterError`` for rented nodes, whose hardware is not described.
    """

    can = ABILITIES["simulated"]

    def __init__(self, spec: AnyCluster) -> None:
        if not spec.can.describe_hardware:
            raise ClusterError(
                f"cluster.kind = {spec.kind!r}: is not simulated, because its hardware is not "
                "described; allowed are emulated and simulated"
            )
        super().__init__(spec)
        self._spec = spec

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Return all that the simulation assumes of the cluster with this limit."""
        assert to_groups is None, "simulated nodes are in one group"
        assumptions = assumed(hardware_of(self._spec, bits_per_s))
        return assumptions | ({"inter_bytes_per_s": None} if bits_per_s is None else {})

    def run(self, launch: Launch) -> Outcome:
        """Predict the cell that the arguments name, without any worker; see ``Cluster.run``."""
        cell_file, output = map(Path, launch.arguments)
        cell = Cell.model_validate_json(cell_file.read_bytes())
        self._spec = cell.cluster  # of as many nodes as the cell wants
        start_barrier.wait(output)
        hardware, workload = cluster_of(cell), workload_of(cell)
        prediction = predict(workload, hardware)
        if prediction.state == "oom":
            return Outcome("oom", error=prediction.error)
        measurement = measured(workload, hardware, prediction)
        (output / "measurement.json").write_text(
            measurement.model_dump_json(indent=1), encoding="utf-8"
        )
        return Outcome("ok")


def largest_micro_batch(cell: Cell) -> int:
    """The most sequences per rank and micro-batch with which the cell fits; 0 if none does."""
    return prediction.largest_micro_batch(workload_of(cell), cluster_of(cell))


def assumed(hardware: Hardware) -> dict[str, Any]:
    """The assumptions of a simulation, for its record; without what is unlimited or not known."""
    fields, unknown = asdict(hardware), (float("inf"), None)
    fields["rates"] = {name: rate for name, rate in fields["rates"].items() if rate not in unknown}
    return {name: value for name, value in fields.items() if value not in unknown}


def measured(workload: Workload, hardware: Hardware, prediction: Prediction) -> Measurement:
    """The prediction as a record's measurement: one step, and no losses."""
    entry = registry.find(workload.strategy)
    needs, ranks = prediction.footprint, hardware.ranks_per_node
    critical: dict[str, float] = {}
    timeline = prediction.timeline
    for index in timeline.critical_path:
        stream, span = timeline.tasks[index].stream, timeline.spans[index]
        critical[stream] = critical.get(stream, 0.0) + span.end - span.start
    cached = entry.has_policy or "cache" in needs.host
    on_gpu = hardware.backend == "nccl"
    stored = cycle.activations(workload, hardware.world_size, needs.forward.get("activations", 0.0))
    return Measurement(
        engine=entry.engine,
        engine_version=entry.engine_version() or "not installed",
        policy=workload.policy if entry.has_policy else None,
        parameters=workload.parameters,
        trainable_parameters=workload.trained,
        step_seconds=[prediction.step_seconds],
        losses=[],
        inter_node_bytes_per_step=prediction.inter_node_bytes,
        inter_node_bytes_closed_form=None,
        ledger_bytes_per_step={
            link: dict(phases) for link, phases in prediction.moved_bytes.items()
        },
        link_bytes_per_step=None if prediction.link_bytes is None else dict(prediction.link_bytes),
        server_messages_per_step=prediction.server_messages,
        peak_host_bytes=round(needs.host_bytes / ranks),
        host_cache_bytes=round(needs.host.get("cache", 0.0) / ranks) if cached else None,
        peak_device_bytes=round(needs.device_bytes) if on_gpu else None,
        bytes_by_slot=cycle.sent(workload, hardware.world_size),
        activation_bytes_by_slot=None if stored is None else stored[0],
        activation_bytes_together=None if stored is None else stored[1],
        simulation=Simulation(
            **{name: getattr(prediction, name) for name in ("mfu", "hfu", "bottleneck")},
            busy=dict(prediction.busy),
            critical_seconds=critical,
            device_bytes=dict(needs.device),
            host_bytes=dict(needs.host),
        ),
    )

"""The kinds of clusters that commands run on; each is imported when it is used."""

import os
from collections.abc import Iterable, Sequence

from baselines import registry
from experiments import terminal
from experiments.clusters import privileges
from experiments.clusters.allocation import Allocation, port
from experiments.clusters.interface import Cluster, ClusterError
from experiments.clusters.simulated import SimulatedCluster
from experiments.records.abilities import Kind
from experiments.records.cell import AnyCluster, Cell, ClusterSpec

#: Modules that an emulated cluster imports once, before the first cell, to fork ranks.
PRELOADED = (
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
)


def override(kind: Kind | None) -> ClusterSpec | None:
    """Return the cluster that replaces the matrix file's; ``None`` to keep the file's."""
    return Allocation.from_env().spec if kind == "rented" else None


def preloaded(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Modules that the ranks of these cells start with.

    A process has one DeepSpeed: where the cells want both pins, each cell's ranks import theirs.
    """
    pins = {cell.deepspeed for cell in cells if registry.find(cell.strategy).engine == "deepspeed"}
    return (*PRELOADED, "deepspeed") if pins == {"current"} else PRELOADED


def cluster(
    spec: AnyCluster, preload: Sequence[str] = PRELOADED, simulated: bool = False
) -> Cluster:
    """The cluster that ``spec`` describes, not yet built, for launches that need these modules."""
    if simulated or spec.kind == "simulated":
        return SimulatedCluster(spec)
    spec = spec.model_copy(update={"port": port(os.environ, spec.port)})
    # Clusters of processes, and pyroute2 with them, take long to import.
    if spec.kind == "rented":
        from experiments.clusters.rented import RentedCluster

        return RentedCluster(Allocation.from_env(), spec)
    from experiments.clusters.emulated import EmulatedCluster

    return EmulatedCluster(spec, preload)


def enter_namespace() -> None:
    """Enter a user namespace if emulating a cluster needs one; this starts the command anew."""
    with terminal.stopping(ClusterError):
        privileges.enter_user_namespace_if_needed()

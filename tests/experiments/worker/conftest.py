"""Clusters that run real cells."""

from collections.abc import Iterator

import pytest

from experiments.clusters.emulated import EmulatedCluster
from experiments.commands.kinds import PRELOADED
from experiments.records.cell import ClusterSpec
from tests.experiments import cells
from tests.experiments.cells import Runner


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, privileged: None) -> Iterator[EmulatedCluster]:
    """The cluster that the file's ``CLUSTER`` describes; without one, the usual."""
    preload = [*PRELOADED, "experiments.worker.worker"]
    with EmulatedCluster(_spec(request), preload) as built:
        yield built


@pytest.fixture(scope="module")
def run(
    request: pytest.FixtureRequest,
    cluster: EmulatedCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runner:
    return Runner(cluster, _spec(request), tmp_path_factory.mktemp("cells"))


def _spec(request: pytest.FixtureRequest) -> ClusterSpec:
    return getattr(request.module, "CLUSTER", cells.CLUSTER)

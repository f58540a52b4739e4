"""Runs a preflight on a cluster."""

from __future__ import annotations

import shutil
import time
from datetime import datetime, timezone
from pathlib import Path

from experiments.clusters.interface import Cluster
from experiments.clusters.start_barrier import StartBarrier
from experiments.preflight.schema import Preflight, Probed
from experiments.records import provenance

PROBE = "experiments.preflight.probe:main"
_TIMEOUT_S = 600.0


class PreflightError(RuntimeError):
    """The cluster could not be measured; the message says why."""


def measure(cluster: Cluster, bits_per_s: int | None, directory: Path) -> Preflight:
    """Measure a built cluster whose links are limited to ``bits_per_s``; logs go to ``directory``.

    Raises ``PreflightError`` with the first rank's error.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    started_at, started = datetime.now(timezone.utc), time.monotonic()
    cluster.shape(None)
    with StartBarrier(directory, lambda: cluster.shape(bits_per_s)) as barrier:
        outcome = cluster.run(
            PROBE,
            [str(directory.absolute())],
            logs=directory / "logs",
            environment={},
            timeout_s=_TIMEOUT_S,
        )
    if outcome.state != "ok":
        where = "" if outcome.rank is None else f"rank {outcome.rank}: "
        raise PreflightError(f"{outcome.state}: {where}{provenance.scrub(str(outcome.error))}")
    probed = Probed.model_validate_json((directory / "probed.json").read_bytes())
    origin = provenance.gather()
    return Preflight(
        **dict(probed),
        evidence=cluster.can.evidence,
        nodes=cluster.nodes,
        ranks_per_node=cluster.ranks_per_node,
        inter_bandwidth_bits_per_s=bits_per_s,
        network=barrier.network,
        versions=origin.versions,
        hardware=origin.hardware,
        commit=origin.commit,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
    )

"""Weights & Biases, fed from the records once all cells are finished.

The records are the store; this is a copy of them in another form, one run a cell. It comes after
the last cell, so that it never runs beside a measurement, and a failure in it is a warning.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from experiments.provenance import scrub
from experiments.records import Measurement, Record

#: What ``WANDB_MODE`` may say, and what W&B's own aliases mean.
_MODES = {
    "": "offline",
    "offline": "offline",
    "dryrun": "offline",
    "online": "online",
    "run": "online",
    "disabled": "disabled",
}
#: Nothing but the figures: no console capture, no sampling of the machine, no look at the
#: repository; and no machine's name, program or environment in what may be published.
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "symlink": False,
    "host": "",
    "program": "",
    "init_timeout": 20,
}
_TAG_LENGTH = 64


@dataclass(frozen=True)
class Export:
    """What the sink did: the mode it ended in, how many runs it wrote, what went wrong."""

    mode: str
    runs: int
    warnings: tuple[str, ...]


def export(records: Sequence[Record], directory: Path) -> Export:
    """Write one W&B run for each cell that ran and has none yet below ``directory``/wandb."""
    mode, warnings = _mode()
    new = [r for r in records if r.state != "skipped" and not _runs(directory, r)]
    if mode == "disabled" or not new:
        return Export(mode, 0, tuple(warnings))
    written = 0
    try:
        for record in new:
            if mode == "online" and not _try_online(record, directory, warnings):
                mode = "offline"
            if mode == "offline":
                _write(record, directory, "offline")
            written += 1
    except Exception as error:
        warnings.append(f"W&B runs of {len(new) - written} cells not written: {_brief(error)}")
    _flush()
    return Export(mode, written, tuple(warnings))


def _try_online(record: Record, directory: Path, warnings: list[str]) -> bool:
    """Write the run online, or leave nothing of it and say why not."""
    try:
        _write(record, directory, "online")
    except Exception as error:
        import wandb

        warnings.append(f"W&B cannot be reached, writing offline: {_brief(error)}")
        # Its service process holds the id of the run that failed.
        wandb.teardown()
        for left in _runs(directory, record):
            shutil.rmtree(left, ignore_errors=True)
        return False
    return True


def _flush() -> None:
    """End W&B's service process, which writes the last lines of a finished run when it likes."""
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()


def _mode() -> tuple[str, list[str]]:
    asked = os.environ.get("WANDB_MODE", "").lower()
    mode = _MODES.get(asked)
    if mode is None:
        allowed = ", ".join(name for name in _MODES if name)
        return "offline", [f"WANDB_MODE={asked!r} is not allowed: {allowed}; writing offline"]
    if mode == "online" and not _has_key():
        return "offline", [
            "WANDB_MODE asks for online, but there is no API key in WANDB_API_KEY or ~/.netrc; "
            "writing offline"
        ]
    return mode, []


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _runs(directory: Path, record: Record) -> list[Path]:
    return list(directory.glob(f"wandb/*run-*-{_run_id(record)}"))


def _run_id(record: Record) -> str:
    """The same for the same record, so that a resumed matrix adds only its new cells."""
    return hashlib.sha256(f"{record.cell_id} {record.started_at}".encode()).hexdigest()[:12]


def _write(record: Record, directory: Path, mode: Literal["online", "offline"]) -> None:
    # Imported here, because it takes a second and most commands do not need it.
    import wandb

    # Some of these are W&B's internal ones and may be missing in another version.
    settings = {k: v for k, v in _SETTINGS.items() if k in wandb.Settings.model_fields}
    run = wandb.init(
        mode=mode,
        dir=str(directory),
        project=os.environ.get("WANDB_PROJECT") or "fcdp",
        id=_run_id(record),
        name=record.cell_id,
        group=record.cell.matrix,
        job_type=record.cell.strategy,
        tags=_tags(record),
        config=record.cell.model_dump(mode="json"),
        settings=wandb.Settings(**settings),
    )
    try:
        if record.measurement is not None:
            for point in _history(record.measurement):
                run.log(point)
        run.summary.update(_summary(record))
    finally:
        run.finish(exit_code=0 if record.state == "ok" else 1)


def _tags(record: Record) -> list[str]:
    cluster = record.cell.cluster
    shape = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks"
    tags = [record.evidence, cluster.kind, shape, str(record.hardware.get("cpu", ""))]
    return list(dict.fromkeys(tag[:_TAG_LENGTH] for tag in tags if tag))


def _history(measurement: Measurement) -> list[dict[str, float]]:
    """One point a step; the warm-up steps, which come first, have a loss and no time."""
    warmup = len(measurement.losses) - len(measurement.step_seconds)
    points = []
    for step, loss in enumerate(measurement.losses):
        point = {"step": float(step + 1), "loss": loss}
        if step >= warmup:
            point["step_seconds"] = measurement.step_seconds[step - warmup]
        points.append(point)
    return points


def _summary(record: Record) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "state": record.state,
        "evidence": record.evidence,
        "error": record.error,
        "seconds": record.seconds,
        "commit": record.commit,
        "tokens_per_s": record.tokens_per_s,
        "step_seconds_median": record.step_seconds_median,
    }
    figures |= {f"versions/{name}": version for name, version in record.versions.items()}
    figures |= {f"hardware/{name}": value for name, value in record.hardware.items()}
    figures |= {f"network/{name}": value for name, value in record.network.items()}
    if record.measurement is not None:
        figures |= record.measurement.model_dump(exclude={"losses", "step_seconds"})
    return {name: value for name, value in figures.items() if value is not None}


def _brief(error: Exception) -> str:
    lines = scrub(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__

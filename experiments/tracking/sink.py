"""Weights & Biases, fed from the records once all cells are finished.

The records are the store; this is a copy of them in another form, one W&B run per cell, and one for
the tables and figures. It comes after the last cell, so that it never runs beside a measurement,
and a failure in it is a warning. Cut short, it goes on with the next export: a W&B run that is not
complete is written again under the same id, which online resumes it.
"""

from __future__ import annotations

import netrc
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from experiments.records.provenance import scrub
from experiments.records.record import Record
from experiments.tracking.wandb_runs import WandbRun, cell_run, report_run

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
#: File in the folder of a W&B run: all of it has been written.
_COMPLETE = "complete"


@dataclass(frozen=True)
class Export:
    """What the sink did: the mode it ended in, how many runs it wrote, what went wrong."""

    mode: str
    runs: int
    warnings: tuple[str, ...]


def export(
    records: Sequence[Record],
    directory: Path,
    report: Path | None = None,
    sweep_run: str | None = None,
) -> Export:
    """Write the runs that are not below ``directory``/wandb yet: one for each cell that ran.

    ``report`` is a folder with tables and figures; they become an artifact, of a run of its own,
    together with the records. ``sweep_run`` is the id that a W&B agent has given to the run of a
    single record.
    """
    mode, warnings = _mode()
    ran = [record for record in records if record.state != "skipped"]
    wandb_runs = [cell_run(record, sweep_run) for record in ran]
    if report is not None and ran and report.is_dir():
        wandb_runs.append(report_run(ran, directory, report))
    new = [wandb_run for wandb_run in wandb_runs if not _is_complete(directory, wandb_run)]
    if mode == "disabled" or not new:
        return Export(mode, 0, tuple(warnings))
    written: list[WandbRun] = []
    try:
        for wandb_run in new:
            _remove(directory, wandb_run)
            if mode == "online" and not _try_online(wandb_run, directory, warnings):
                mode = "offline"
            if mode == "offline":
                _write(wandb_run, directory, "offline")
            written.append(wandb_run)
    except Exception as error:
        warnings.append(f"{len(new) - len(written)} W&B runs not written: {_brief(error)}")
    _complete(written, directory)
    return Export(mode, len(written), tuple(warnings))


def _try_online(wandb_run: WandbRun, directory: Path, warnings: list[str]) -> bool:
    """Write the run online, or leave nothing of it and say why not."""
    try:
        _write(wandb_run, directory, "online")
    except Exception as error:
        import wandb

        warnings.append(f"W&B cannot be reached, writing offline: {_brief(error)}")
        # Its service process holds the id of the run that failed.
        wandb.teardown()
        _remove(directory, wandb_run)
        return False
    return True


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


def _folders(directory: Path, wandb_run: WandbRun) -> list[Path]:
    return list(directory.glob(f"wandb/*run-*-{wandb_run.id}"))


def _complete(wandb_runs: Sequence[WandbRun], directory: Path) -> None:
    # Its service process writes files when it pleases, and all of them before it ends.
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()
    for wandb_run in wandb_runs:
        for folder in _folders(directory, wandb_run):
            (folder / _COMPLETE).touch()


def _is_complete(directory: Path, wandb_run: WandbRun) -> bool:
    return any((folder / _COMPLETE).exists() for folder in _folders(directory, wandb_run))


def _remove(directory: Path, wandb_run: WandbRun) -> None:
    for left in _folders(directory, wandb_run):
        shutil.rmtree(left, ignore_errors=True)


def _write(wandb_run: WandbRun, directory: Path, mode: Literal["online", "offline"]) -> None:
    # Imported here, because it takes a second and most commands do not need it.
    import wandb

    # Some of these are W&B's internal ones and may be missing in another version.
    settings = {k: v for k, v in _SETTINGS.items() if k in wandb.Settings.model_fields}
    run = wandb.init(
        mode=mode,
        dir=str(directory),
        project=os.environ.get("WANDB_PROJECT") or "fcdp",
        id=wandb_run.id,
        resume="allow",
        name=wandb_run.name,
        group=wandb_run.group,
        job_type=wandb_run.job_type,
        tags=wandb_run.tags,
        config=wandb_run.config,
        settings=wandb.Settings(**settings),
    )
    try:
        wandb_run.fill(run)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=wandb_run.exit_code)


def _brief(error: Exception) -> str:
    lines = scrub(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__

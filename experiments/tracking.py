"""Weights & Biases, fed from the records: while cells run, and once all are finished.

The records are the store; this is a copy of them in another form, one W&B run per cell, and one for
the tables and figures. While a cell runs, ``Live`` logs its steps as the record will have them:
each rank appends them to a file that a thread of the runner reads, with the time that rank 0 gives;
or, from nodes without a common folder, once the record is there. A run that is not whole then,
``export`` writes again under the same id, which resumes it online. A failure is a warning.
"""

from __future__ import annotations

import hashlib
import logging
import netrc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from experiments.records.cell import Cell
from experiments.records.provenance import scrub
from experiments.records.record import Measurement, Record
from experiments.records.select import FILE
from experiments.runner.directory import Step, steps
from simulation.files import stored
from simulation.quantities import format_link

#: Modes by the values of ``WANDB_MODE``, W&B's own aliases among them.
_MODES = {
    **dict.fromkeys(("", "offline", "dryrun"), "offline"),
    **dict.fromkeys(("online", "run"), "online"),
    "disabled": "disabled",
}
#: Nothing but the figures: no console capture, no sampling of the machine, no look at the
#: repository; and no machine's name, program or environment in what may be published.
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("disable_code", "disable_git", "disable_job_creation", "silent"), True),
    **dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True),
    **dict.fromkeys(("x_save_requirements", "symlink"), False),
    **dict.fromkeys(("host", "program"), ""),
    "console": "off",
    "init_timeout": 20,
}
#: File that marks the folder of a W&B run that has been written to its end.
_COMPLETE = "complete"
#: Free bytes below which a disk counts as full.
_ROOM = 2**16


@dataclass(frozen=True)
class Export:
    """The sink's work: the mode it ended in, how many runs it wrote, what went wrong."""

    mode: str
    runs: int
    warnings: tuple[str, ...]
    #: Whether all that was to be written is there, to be uploaded.
    whole: bool = True


def sweep_run() -> str | None:
    """The id that W&B's agent has given to the one run of this process; ``None`` without one."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def export(records: Sequence[Record], directory: Path, report: Path | None = None) -> Export:
    """Write the runs that are not below ``directory``/wandb yet: one for each cell that ran.

    ``report`` is a folder with tables and figures; they become an artifact, of a run of its own,
    together with the records. A sweep has runs of cells alone.
    """
    mode, warnings = asked_mode()
    ran = [record for record in records if record.state != "skipped"]
    wandb_runs = [recorded_run(record) for record in ran]
    if report is not None and ran and report.is_dir() and not sweep_run():
        wandb_runs.append(report_run(ran, directory, report))
    new = [
        wandb_run
        for wandb_run in wandb_runs
        if not any((folder / _COMPLETE).exists() for folder in wandb_run.folders(directory))
    ]
    if mode == "disabled" or not new:
        return Export(mode, 0, tuple(warnings))
    written = 0
    # On a full disk W&B's log cannot be written either, which Python would show as tracebacks.
    shows_errors, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        for wandb_run in new:
            wandb_run.remove(directory)
            run, mode = begin(wandb_run, directory, mode, warnings)
            with _failed_on_error(run):
                wandb_run.fill(run)
            written += 1
    except Exception as error:
        warnings.append(f"{len(new) - written} W&B runs not written: {_brief(error)}")
    finally:
        settle()
        logging.raiseExceptions = shows_errors
    if not all(mark_whole(wandb_run, directory) for wandb_run in new[:written]):
        written = 0
        warnings.append(
            f"no room is left where {directory.name} is: W&B's files are cut; make room, and the "
            "same command with --resume writes them again"
        )
    return Export(mode, written, tuple(warnings), whole=written == len(new))


def settle() -> None:
    """End W&B's service process, which writes files late, but all of them before it ends."""
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()


def mark_whole(wandb_run: WandbRun, directory: Path) -> bool:
    """Mark the run as written to its end, unless the disk is full; return whether it is."""
    if shutil.disk_usage(directory).free < _ROOM:
        return False  # what is there may be cut, without a word of W&B's
    for folder in wandb_run.folders(directory):
        (folder / _COMPLETE).touch()
    return True


def asked_mode() -> tuple[str, list[str]]:
    """Return the mode that ``WANDB_MODE`` asks for, or the one instead, and warnings why."""
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


def begin(
    wandb_run: WandbRun, directory: Path, mode: str, warnings: list[str], **settings: Any
) -> tuple[Any, str]:
    """Begin W&B's run; return it and its mode: offline, with a warning, if W&B is not reached."""
    # Imported here, because it takes a second and most commands do not need it.
    import wandb

    # Some of these are W&B's internal ones and may be missing in another version.
    known = {k: v for k, v in (_SETTINGS | settings).items() if k in wandb.Settings.model_fields}

    def init(mode: Literal["online", "offline"]) -> Any:
        return wandb.init(
            mode=mode,
            dir=str(directory),
            project=os.environ.get("WANDB_PROJECT") or "fcdp",
            id=wandb_run.id,
            resume="allow",
            settings=wandb.Settings(**known),
            **wandb_run.about,
        )

    if mode == "online":
        try:
            return init("online"), mode
        except Exception as error:
            warnings.append(f"W&B cannot be reached, writing offline: {_brief(error)}")
            # Its service process holds the id of the run that failed.
            wandb.teardown()
            wandb_run.remove(directory)
    return init("offline"), "offline"


@contextmanager
def _failed_on_error(run: Any) -> Iterator[None]:
    """End the run as failed where the body raises, or ``wandb.init`` would return it again."""
    try:
        yield
    except BaseException:
        run.finish(exit_code=1)
        raise


def _brief(error: Exception) -> str:
    lines = scrub(str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_TAG_LENGTH = 64
#: Titles of the charts, by the column that they show.
_CHARTS = {
    "tokens_per_s": "Tokens per second",
    "inter_node_megabytes_per_step": "MB between nodes per step",
}


@dataclass(frozen=True)
class WandbRun:
    """A W&B run to be written, which has the same id whenever its record is exported."""

    id: str
    #: Its name, group, job type, configuration and tags, as W&B takes them.
    about: dict[str, Any]
    #: Writes W&B's run, and ends it.
    fill: Callable[[Any], None] = lambda run: run.finish()

    def folders(self, directory: Path) -> list[Path]:
        """Where W&B has written it, whole or not."""
        return list(directory.glob(f"wandb/*run-*-{self.id}"))

    def remove(self, directory: Path) -> None:
        for left in self.folders(directory):
            shutil.rmtree(left, ignore_errors=True)


def cell_run(cell: Cell, started_at: str) -> WandbRun:
    """Name the W&B run of a cell that has no record yet; group = matrix, job type = strategy."""
    return WandbRun(
        # The same for the same record: a resumed matrix adds only its new cells.
        sweep_run() or _digest(cell.id, started_at),
        {
            "name": cell.id,
            "group": cell.matrix,
            "job_type": cell.variant,
            "config": _config(cell),
            "tags": [],
        },
    )


def recorded_run(record: Record) -> WandbRun:
    """The W&B run of a cell that has ended: its history, its summary."""
    return replace(cell_run(record.cell, record.started_at), fill=partial(finish, record=record))


def finish(run: Any, record: Record | None, logged: int = 0) -> None:
    """Log the record's steps after ``logged``, and end the run: failed, if there is no record."""
    if record is not None:
        history = _history(record.measurement) if record.measurement else []
        for step, point in enumerate(history[logged:], start=logged + 1):
            # With its number, a point that a resumed run has already is not added again.
            run.log(point, step=step)
        run.tags = _tags(record)
        run.summary.update(_summary(record))
    run.finish(exit_code=0 if record is not None and record.state == "ok" else 1)


def report_run(records: Sequence[Record], directory: Path, report: Path) -> WandbRun:
    """The W&B run that shows all cells: a table, charts, the figures, and all files to download."""
    matrix = records[0].cell.matrix

    def fill(run: Any) -> None:
        import wandb

        # The browser shows the cells as a table, two charts of it, and the figures.
        rows = [_row(record) for record in records]
        table = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        shown: dict[str, Any] = {"cells": table}
        for name, title in _CHARTS.items():
            shown[f"charts/{name}"] = wandb.plot.bar(table, "cell", name, title=title)
        for figure in sorted(report.rglob("*.png")):
            shown[f"figures/{figure.stem}"] = wandb.Image(str(figure))
        run.log(shown)
        # A suite's matrix has a slash in its name, which an artifact's may not.
        artifact = wandb.Artifact(f"{matrix.replace('/', '-')}-report", type="report")
        with _staging(directory / "wandb" / "data"):
            artifact.add_file(str(stored(directory / FILE)), skip_cache=True)
            for file in sorted(path for path in report.rglob("*") if path.is_file()):
                artifact.add_file(str(file), str(file.relative_to(report)), skip_cache=True)
            run.log_artifact(artifact)
        run.finish(exit_code=0)

    about = {
        "name": f"{matrix}-report",
        "group": matrix,
        "job_type": "report",
        "config": {"matrix": matrix},
        "tags": sorted({record.evidence for record in records}),
    }
    cells = sorted(cell_run(of.cell, of.started_at).id for of in records)
    return WandbRun(_digest("report", *cells), about, fill)


def _row(record: Record) -> dict[str, Any]:
    """A cell in the table of all cells, by column."""
    cell, measured = record.cell, record.measurement
    sent = None if measured is None else measured.inter_node_bytes_per_step / 1e6
    return {
        "cell": record.cell_id,
        "strategy": cell.subject,
        "model": cell.model.name,
        "tuning": cell.tuning,
        "link": format_link(cell.inter_bandwidth_bits_per_s),
        "accumulation": cell.accumulation,
        "state": record.state,
        "evidence": record.evidence,
        "tokens_per_s": record.tokens_per_s,
        "step_seconds": record.step_seconds_median,
        "inter_node_megabytes_per_step": sent,
    }


def _config(cell: Cell) -> dict[str, Any]:
    """The cell's settings, none of which its strategy or its tuning does not have."""
    settings = cell.flat({"origin": True})
    if cell.tuning == "full":
        del settings["lora_rank"]
    return settings


@contextmanager
def _staging(directory: Path) -> Iterator[None]:
    """Stage an artifact's files beside the runs, for `wandb sync`, unless the user chose where."""
    configured = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = configured or str(directory.absolute())
    try:
        yield
    finally:
        if configured is None:
            del os.environ["WANDB_DATA_DIR"]


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def _tags(record: Record) -> list[str]:
    cell, cluster = record.cell, record.cell.cluster
    shape = f"{cluster.nodes} nodes x {cluster.ranks_per_node} ranks"
    link, cpu = format_link(cell.inter_bandwidth_bits_per_s), str(record.hardware.get("cpu", ""))
    what = (cell.variant, *cell.choices, cell.model.name, cell.tuning, link)
    tags = (*what, record.evidence, cluster.kind, shape, cpu)
    return list(dict.fromkeys(tag[:_TAG_LENGTH] for tag in tags if tag))


def _history(measurement: Measurement) -> list[dict[str, float]]:
    """One point per step, whose number is W&B's; warm-up steps, the first, have no time."""
    points = [{"loss": loss} for loss in measurement.losses]
    for point, seconds in zip(points[::-1], measurement.step_seconds[::-1], strict=False):
        point["step_seconds"] = seconds
    return points


def _summary(record: Record) -> dict[str, Any]:
    names = ("state", "evidence", "error", "seconds", "commit")
    derived = ("tokens_per_s", "step_seconds_median")
    figures = {name: getattr(record, name) for name in (*names, *derived)}
    for part in ("versions", "hardware", "network"):
        figures |= {f"{part}/{name}": value for name, value in getattr(record, part).items()}
    if record.measurement is not None:
        figures |= record.measurement.model_dump(exclude={"losses", "step_seconds"})
    return {name: value for name, value in figures.items() if value is not None}


#: Seconds between two looks at the steps: rare enough to be no load on cores that train.
_INTERVAL_S = 0.5
#: Settings of runs that are followed live: the machine's load is sampled, and W&B's file is as new
#: as what was logged.
_LIVE_SETTINGS = {"x_disable_stats": False, "x_transaction_log_flush_interval": _INTERVAL_S}


class Live(AbstractContextManager["Live"]):
    """Follows the cells of one run; a context manager around it, and an observer of the runner.

    ``link`` is called with the address of each W&B run that is online.
    """

    def __init__(self, directory: Path, link: Callable[[str], None]) -> None:
        self._directory = directory
        self._link = link
        self._mode, _ = asked_mode()
        #: Thread that follows the running cell until ``_ended`` is set, and ``_record`` before it.
        self._follower: threading.Thread | None = None
        self._ended = threading.Event()
        self._record: Record | None = None

    def __exit__(self, *_: object) -> None:
        self.cell_finished(None)
        settle()

    def cell_started(self, cell: Cell, directory: Path, started_at: str) -> None:
        """Begin the cell's W&B run, and follow its steps from now on."""
        if self._mode == "disabled":
            return
        arguments = cell_run(cell, started_at), cell, directory
        self._ended.clear()
        self._follower = threading.Thread(
            target=self._follow, args=arguments, name="wandb", daemon=True
        )
        self._follower.start()

    def cell_finished(self, record: Record | None) -> None:
        """Log the steps that are left, and end the W&B run: as failed, if there is no record."""
        follower, self._follower = self._follower, None
        if follower is not None:
            self._record = record
            self._ended.set()
            follower.join()

    def _follow(self, wandb_run: WandbRun, cell: Cell, directory: Path) -> None:
        """Log the cell's steps, then what its record has; runs are offline once W&B is lost."""
        try:
            run, self._mode = begin(wandb_run, self._directory, self._mode, [], **_LIVE_SETTINGS)
            with _failed_on_error(run):
                self._log(run, cell, directory)
        except Exception:
            # It is no reason to end a measurement; ``export`` tries again and says what is wrong.
            return
        if self._record is not None:
            mark_whole(wandb_run, self._directory)  # nothing is left to ``export``

    def _log(self, run: Any, cell: Cell, directory: Path) -> None:
        if self._mode == "online":
            self._link(run.url)
        logged = 0
        for step in self._steps(directory, cell.cluster.nodes * cell.cluster.ranks_per_node):
            point = {"loss": step.loss, "_timestamp": step.at}
            if step.step > cell.warmup_steps:
                point["step_seconds"] = step.seconds
            run.log(point, step=(logged := step.step), commit=True)
        finish(run, self._record, logged)

    def _steps(self, directory: Path, ranks: int) -> Iterator[Step]:
        """The steps as their lines are written, until the cell has ended."""
        seen, ended = 0, False
        while not ended:
            ended = self._ended.wait(_INTERVAL_S)
            new = steps(directory, seen, ranks)
            seen += len(new)
            yield from new

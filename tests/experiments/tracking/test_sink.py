"""W&B's copy of the records: complete, quick, quiet about keys, and never in the way."""

import base64
import json
import sys
from pathlib import Path

import pytest
import wandb

from experiments import tracking
from experiments.tracking import export
from tests import programs
from tests.experiments.stand_in import cell, record
from tests.experiments.tracking import offline

#: A PNG of one pixel.
FIGURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
KEY = "markermarkermarkermarkermarkermarkermark"


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_a_cell_that_ran_and_one_of_the_report_and_no_second_one(tmp_path: Path) -> None:
    """The report's run has a table and charts, and all files as an artifact."""
    ran = [
        record(cell(matrix="suite/small")),
        record(cell(strategy="fsdp2", matrix="suite/small"), "oom", "rank 1: out of memory"),
    ]
    skipped = record(cell(seed=3, matrix="suite/small"), "skipped", "a reason")
    report = tmp_path / "report"
    result = export([*ran, skipped], tmp_path, report)  # it could not be drawn
    assert (result.mode, result.runs, result.warnings) == ("offline", 2, ())
    report.mkdir()
    (tmp_path / "records.jsonl").write_text("the records")
    (report / "comparison.md").write_text("the table")
    (report / "losses.png").write_bytes(FIGURE)
    assert export(ran, tmp_path, report).runs == 1
    assert export(ran, tmp_path, report).runs == 0
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 3
    (run,) = (run for run in offline.runs(tmp_path) if run.job_type == "report")
    (stored,) = (path.read_bytes() for path in run.folder.glob("run-*.wandb"))
    for name in (b"suite-small-report", b"comparison.md", b"losses.png", b"records.jsonl"):
        assert name in stored
    assert {b"the table", FIGURE, b"the records"} <= {*files(tmp_path / "wandb/data").values()}
    (point,) = run.history
    assert point["cells"]["_type"] == "table-file"
    assert point["figures/losses"]["_type"] == "image-file"
    table = json.loads((run.folder / "files" / point["cells"]["path"]).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["strategy"] for row in rows] == ["fcdp", "fsdp2"]
    assert [row["tokens_per_s"] for row in rows] == [ran[0].tokens_per_s, None]
    assert rows[0]["link"] == "100 Mbit/s"
    assert "charts/tokens_per_s" in run.config["_wandb"]["visualize"]
    # A resumed matrix exports its records again, and has another report.
    assert export([*ran, record(cell(seed=4, matrix="suite/small"))], tmp_path, report).runs == 2


def test_a_run_that_was_cut_short_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "_summary", die)
        with pytest.raises(KeyboardInterrupt):
            export([record(cell(seed=5))], tmp_path)
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    wandb.teardown()  # as the end of the process does
    assert export([record(cell(seed=5))], tmp_path).runs == 1
    assert export([record(cell(seed=5))], tmp_path).runs == 0
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"step_seconds_median" in stored.read_bytes()


def test_a_cells_run_is_read_back(tmp_path: Path) -> None:
    """Settings of its own alone, tags to filter by, and a summary; the live run has the steps."""
    of = cell(strategy="fcdp", policy="disk")
    export([record(of, step_seconds=[0.4, 0.5, 0.6])], tmp_path)
    (run,) = offline.runs(tmp_path)
    assert (run.name, run.group, run.job_type) == (of.id, "small", "fcdp")
    assert {"fcdp", "llama-4x128", "full", "100 Mbit/s", "emulated"} <= set(run.tags)
    assert run.config["policy"] == "disk"
    assert not {"deepspeed", "lora_rank", "origin", "threads"} & set(run.config)
    theirs = tracking._config(cell(strategy="deepspeed-zero3", tuning="lora"))
    assert (theirs["deepspeed"], theirs["lora_rank"]) == ("current", cell().lora_rank)
    assert not {"policy", "gather_codec", "adapters"} & set(theirs)
    assert run.summary["step_seconds_median"] == 0.5


def test_the_key_is_nowhere(tmp_path: Path) -> None:
    """W&B is even asked to use it, here with a server that does not answer."""
    code = (
        "from pathlib import Path\n"
        "from experiments import tracking\n"
        "from tests.experiments.stand_in import cell, record\n"
        "tracking._SETTINGS['init_timeout'] = 2\n"
        f"print(tracking.export([record(cell())], Path({str(tmp_path)!r})))\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    asked = {"WANDB_API_KEY": KEY, "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), **asked}
    result = programs.ended(sys.executable, "-c", code, environment=environment, within_s=100)
    assert result.returncode == 0, result.stderr
    assert "mode='offline', runs=1" in result.stdout
    assert "cannot be reached, writing offline" in result.stdout
    assert KEY not in result.stdout + result.stderr
    assert files(tmp_path)
    assert not [path for path, content in files(tmp_path).items() if KEY.encode() in content]


def test_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online without a key, and in an unknown mode, W&B's files are written offline."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert export([record(cell())], tmp_path).runs == 0
    assert not (tmp_path / "wandb").exists()
    monkeypatch.setenv("WANDB_MODE", "online")
    result = export([record(cell())], tmp_path)
    assert (result.mode, result.runs) == ("offline", 1)
    assert "there is no API key in WANDB_API_KEY or ~/.netrc" in result.warnings[0]
    monkeypatch.setenv("WANDB_MODE", "somewhere")
    result = export([record(cell())], tmp_path)  # what is whole is not written again
    assert result.mode == "offline"
    assert "WANDB_MODE='somewhere' is not allowed: offline," in result.warnings[0]
    monkeypatch.setenv("WANDB_MODE", "online")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert tracking.asked_mode() == ("online", [])


def test_on_a_full_disk_nothing_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = tracking.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(tracking.shutil, "disk_usage", lambda _: usage._replace(free=0))
    result = export([record(cell())], tmp_path)
    assert (result.runs, result.whole) == (0, False)
    assert "no room is left" in result.warnings[0]
    monkeypatch.undo()
    assert export([record(cell())], tmp_path).runs == 1

"""The audit finds what a baseline must not do, and lets pass what is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from analysis.__main__ import app
from analysis.audit import audit, markdown
from experiments import records
from experiments.records import Record
from tests.analysis.made_up import MODELS, cell, measurement, record

LEAST = 10e6
LOSSES = [5.0, 4.0, 3.0]


def made(strategy: str, engine: str, sent: float, losses: list[float], **changes: Any) -> Record:
    base = cell("fcdp", MODELS[0], "full", None)
    of = base.model_copy(update={"strategy": strategy, **changes})
    measured = measurement(base).model_copy(
        update={
            "engine": engine,
            "inter_node_bytes_per_step": sent,
            "inter_node_bytes_closed_form": LEAST,
            "losses": losses,
        }
    )
    return record(base).model_copy(update={"cell": of, "cell_id": of.id, "measurement": measured})


REFERENCE = made("fsdp2", "fsdp2", 2 * LEAST, LOSSES)


@pytest.mark.parametrize(
    ("strategy", "engine", "sent", "losses", "problem"),
    [
        ("fcdp", "fcdp", 1.01 * LEAST, LOSSES, None),
        ("fcdp", "fcdp", 1.2 * LEAST, LOSSES, "sends more than is explained"),
        ("deepspeed-zero3", "deepspeed", 2 * LEAST, LOSSES, None),
        ("deepspeed-zero3", "deepspeed", 0.7 * LEAST, LOSSES, "sends less than its schedule must"),
        ("deepspeed-zero3", "deepspeed", 4 * LEAST, LOSSES, "sends more than is explained"),
        ("hpz", "fcdp", LEAST, [5.0, 4.0, 3.01], "learns something else"),
        ("qwz", "fcdp", LEAST, [5.0, 4.0, 3.01], None),
        ("qwz", "fcdp", LEAST, [5.0, 4.0, 4.0], "learns something else"),
    ],
)
def test_a_cell_is_judged_by_its_bytes_and_losses(
    strategy: str, engine: str, sent: float, losses: list[float], problem: str | None
) -> None:
    _, finding = audit([REFERENCE, made(strategy, engine, sent, losses)])
    assert finding.problems == (() if problem is None else (problem,))


def test_a_wasteful_backend_is_explained() -> None:
    (finding,) = audit([REFERENCE])
    assert finding.factor == 2
    assert "is an all-reduce" in finding.explanation
    table = markdown([finding])
    assert "| 2.0× [1] |" in table
    assert table.endswith("over that ring).\n")


def test_parameters_kept_over_the_turn_are_explained() -> None:
    _, finding = audit([REFERENCE, made("deepspeed-zero3", "deepspeed", 0.92 * LEAST, LOSSES)])
    assert finding.problems == ()
    assert "what it still holds from the end of forward" in finding.explanation


def test_losses_are_compared_among_equal_settings_only() -> None:
    other = made("fcdp", "fcdp", LEAST, [1.0], accumulation=4)
    assert audit([REFERENCE, other])[1].loss_difference is None


def test_cells_that_did_not_run_are_left_out() -> None:
    assert audit([REFERENCE.model_copy(update={"state": "skipped", "measurement": None})]) == []


@pytest.mark.parametrize(("sent", "status"), [(LEAST, 0), (2 * LEAST, 1)])
def test_the_command_fails_where_a_strategy_does(tmp_path: Path, sent: float, status: int) -> None:
    file = tmp_path / "records.jsonl"
    records.append(made("fcdp", "fcdp", sent, LOSSES), file)
    done = CliRunner().invoke(app, ["audit", str(file)])
    assert done.exit_code == status
    assert "| fcdp | full | 1 |" in done.stdout

"""The audit finds what a baseline must not do, and lets pass what is explained."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from analysis.__main__ import app
from analysis.compare.audit import audit, markdown
from experiments.records.record import Record, read
from simulation import files
from tests.analysis.made_up import cell, record
from tests.programs import RESULTS

LEAST = 10e6
#: Two steps of warm-up and eight that are measured.
LOSSES = [5.0, 4.8, 4.6, 4.4, 4.2, 4.0, 3.8, 3.6, 3.4, 3.0]


def made(strategy: str, engine: str, sent: float, losses: list[float], **changes: Any) -> Record:
    """A cell with a closed form of ``LEAST`` bytes, or of ``least``."""
    least = changes.pop("least", LEAST)
    return record(
        cell(strategy, **changes),
        engine=engine,
        inter_node_bytes_per_step=sent,
        inter_node_bytes_closed_form=least,
        losses=losses,
    )


REFERENCE = made("fsdp2", "fsdp2", 2 * LEAST, LOSSES)


@pytest.mark.parametrize(
    ("strategy", "engine", "sent", "losses", "problem"),
    [
        ("fcdp", "fcdp", 1.01 * LEAST, LOSSES, None),
        ("fcdp", "fcdp", 1.2 * LEAST, LOSSES, "sends more than is explained"),
        ("fsdp2-hierarchical", "fsdp2", 1.2 * LEAST, LOSSES, "sends more than is explained"),
        ("deepspeed-zero3", "deepspeed", 2 * LEAST, LOSSES, None),
        ("deepspeed-zero3", "deepspeed", 0.7 * LEAST, LOSSES, "sends less than its schedule must"),
        ("deepspeed-zero3", "deepspeed", 4 * LEAST, LOSSES, "sends more than is explained"),
        ("fcdp", "fcdp", 1.05 * LEAST, LOSSES, "sends more than is explained"),
        ("ddp", "ddp", 1.7 * LEAST, LOSSES, "sends more than is explained"),
        # Engines without an allowance of their own.
        ("pipeline", "pipeline", 1.01 * LEAST, LOSSES, None),
        ("pipeline", "pipeline", 0.9 * LEAST, LOSSES, "sends less than its schedule must"),
        ("fuyou", "fuyou", 1.01 * LEAST, LOSSES, None),
        ("hpz", "fcdp", LEAST, [*LOSSES[:9], 3.01], "learns something else"),
    ],
)
def test_a_cell_is_judged_by_its_bytes_and_losses(
    strategy: str, engine: str, sent: float, losses: list[float], problem: str | None
) -> None:
    _, finding = audit([REFERENCE, made(strategy, engine, sent, losses)])
    assert finding.problems == (() if problem is None else (problem,))


LORA = {"tuning": "lora", "dtype": "float32"}


@pytest.mark.parametrize(
    ("strategy", "engine", "sent", "changes", "why"),
    [
        ("fsdp2", "fsdp2", 2 * LEAST, {}, ["is an all-reduce"]),
        ("deepspeed-zero3", "deepspeed", 0.92 * LEAST, {},
         ["what it still holds from the end of forward"]),
        # Bytes are those of the committed records of parity.
        ("zeropp", "fcdp", 22_370, {**LORA, "least": 19_392}, ["Headers of small messages"]),
        ("deepspeed-hpz", "deepspeed", 368_460, {**LORA, "least": 98_304},
         ["3 times", "gathers one by one all parameters that it keeps whole"]),
    ],
)  # fmt: skip
def test_bytes_beside_the_least_are_explained(
    strategy: str, engine: str, sent: float, changes: dict[str, Any], why: list[str]
) -> None:
    tuned = {name: changes[name] for name in LORA if name in changes}
    reference = made("fsdp2", "fsdp2", 1.5 * LEAST, LOSSES, **tuned)
    _, finding = audit([reference, made(strategy, engine, sent, LOSSES, **changes)])
    assert finding.problems == ()
    for number, (part, reason) in enumerate(zip(why, finding.explanations, strict=True), 1):
        assert part in reason
        assert f"[{number}] {reason}.\n" in markdown([finding])


def test_no_flat_allowance_lets_much_more_pass_where_little_is_sent() -> None:
    """An allowance of 3 times the least, which was here once, did."""
    reference = made("fsdp2", "fsdp2", 1.5 * LEAST, LOSSES, **LORA)
    _, finding = audit([reference, made("zeropp", "fcdp", 58_000, LOSSES, least=19_392, **LORA)])
    assert finding.problems == ("sends more than is explained",)


def failed(record: Record, state: str = "failed") -> Record:
    changes = {"state": state, "error": "rank 1: Traceback\nIt | failed", "measurement": None}
    return record.model_copy(update=changes)


def test_cells_that_did_not_run_are_problems() -> None:
    _, finding = audit([REFERENCE, failed(made("fcdp", "fcdp", LEAST, LOSSES))])
    assert finding.problems == ("did not run (failed): It | failed",)
    assert markdown([finding]).splitlines()[2] == (
        r"| fcdp | full | 1 | – | – | – | – | did not run (failed): It \| failed |"
    )


def test_luwus_records_are_judged_by_their_bytes() -> None:
    findings = audit(read(RESULTS / "luwu/two/records.jsonl"))
    of_luwu = [finding for finding in findings if finding.cell.strategy == "luwu"]
    assert of_luwu
    problems = [problem for finding in of_luwu for problem in finding.problems]
    assert not any("sends" in problem for problem in problems), problems


@pytest.mark.parametrize(("sent", "status"), [(LEAST, 0), (2 * LEAST, 1)])
def test_the_command_fails_where_a_strategy_does(tmp_path: Path, sent: float, status: int) -> None:
    file = tmp_path / "records.jsonl"
    files.append(REFERENCE, file)
    files.append(made("fcdp", "fcdp", sent, LOSSES), file)
    done = CliRunner().invoke(app, ["audit", str(file)])
    assert done.exit_code == status
    assert "| fcdp | full | 1 |" in done.stdout

"""The display of a run and the tables at its end, as logs and terminals of some widths show them.

``screens.txt`` has each. ``python -m tests.experiments.terminal.test_screens`` writes what they
are today: read the difference.
"""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

from rich.console import Console

from experiments.matrix import reader
from experiments.matrix.files import parse
from experiments.records.record import Cached, Machine, Record
from experiments.terminal import progress, variants_table
from experiments.terminal.progress import Progress
from experiments.terminal.summary_table import summary
from tests.experiments.command_line import rendered
from tests.experiments.stand_in import cell, record

GOLDEN = Path(__file__).with_name("screens.txt")
_LEDGER = {"inter_node": {"forward": 2e6, "backward": 1e6, "reduce": 3e6}}


def beside_zero3() -> list[Record]:
    """DeepSpeed, FSDP2 and FCDP on one model and link; FCDP sends two thirds in half the time."""
    return [
        record(cell(strategy="deepspeed-zero3"), inter_node_bytes_closed_form=None),
        record(cell(strategy="fsdp2"), "oom", "rank 1: out of memory"),
        record(cell(), step_seconds=[0.25] * 6, inter_node_bytes_per_step=4.2e6),
        record(cell(tuning="lora", strategy="fsdp2"), losses=[math.nan]),
    ]


def caching(policy: str, seconds: list[float], **held: int) -> Record:
    """A record of FCDP with so many bytes in each tier."""
    cache = Cached(
        hits_per_step=4.0 * bool(held),
        misses_per_step=5.0,
        entries=dict.fromkeys(held, 2.0),
        entry_bytes=held,
        device_bytes=held.get("device", 0),
        host_bytes=held.get("host", 0),
    )
    phases = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}
    figures = {"step_seconds": seconds, "phase_seconds": phases, "ledger_bytes_per_step": _LEDGER}
    return record(cell(policy=policy), cache=cache, **figures)


def policies() -> list[Record]:
    return [
        caching("none", [1.0, 1.1, 1.2]),
        caching("host", [0.5, 0.5, 0.5], host=1_580_000),
        caching("disk", [1.1, 1.2, 1.3], disk=3_000_000),
        caching("budget(device=1MiB, host=2MiB)", [2.0] * 3, device=790_000, host=1_580_000),
        record(cell(policy="auto"), "failed", "an error"),
    ]


def screens() -> Iterator[tuple[str, list[str]]]:
    strategies = ("deepspeed-zero3", "fcdp")
    yield "beside ZeRO-3", rendered(summary(beside_zero3()))
    large = [
        record(cell(strategy=strategy), inter_node_bytes_per_step=sent)
        for strategy, sent in zip(strategies, (1.2e8, 1.160855e12), strict=True)
    ]
    for width in (60, 80, 100):
        yield f"large numbers, {width} columns", rendered(summary(large), width)
    # Another number of steps is still the same comparison; equal times differ by nothing.
    by_count = [
        record(cell(strategy=strategy, accumulation=accumulation, steps=steps))
        for strategy, steps in zip(strategies, (3, 5), strict=True)
        for accumulation in (1, 4)
    ]
    yield "groups by a setting that varies", rendered(summary(by_count))
    held_out = record(cell(held_out=2), held_out_loss=5.25)
    without = record(cell(held_out=2, strategy="fsdp2"), "oom", "no memory")
    yield "held-out losses", rendered(summary([held_out, without]), 120)
    slow = record(cell(strategy="deepspeed-zero3", steps=2), losses=[5.6, 5.5])
    quick = record(cell(steps=3), losses=[5.6, 5.5, 5.4])
    yield "losses of one step", rendered(summary([slow, quick]))
    error = "rank 0: Traceback\n  File x\nRuntimeError: the cause"
    failed = [record(cell(seed=seed), "failed", error) for seed in range(5)]
    skipped = record(cell(seed=9), "skipped", "not interesting")
    yield "cells that ended alike", rendered(summary([*failed, skipped]))
    figures = {"inter_node_bytes_closed_form": 10e6, "inter_node_bytes_per_step": 9e6}
    less = record(cell(strategy="deepspeed-zero3"), engine="deepspeed", **figures)
    yield "a minimum above what was sent", rendered(summary([less]), 120)
    busy = Machine(load=0.1, cores=2, steal_share=0.57)
    on_busy = [record(cell()).model_copy(update={"machine": busy})]
    yield "a busy machine", rendered(summary(on_busy))
    yield "variants of FCDP", rendered(variants_table.table(policies()) or "", 120)


def displays(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The lines of a log and of a terminal while cells run, whose files are in the folder."""
    matrix = reader.read("quickstart", changes=parse(["model=gpt2-4x128"]))
    cells = matrix.cells[:4]
    first, *_ = records = [*map(record, cells)]
    log = io.StringIO()
    with Progress(matrix, cells, records[:2], Console(file=log, width=100)) as shown:
        for each in records[2:]:
            shown.cell_started(each.cell, folder, each.started_at)
            shown.cell_finished(each)
    yield "a log of a run that goes on", log.getvalue().splitlines()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True)
    with Progress(matrix, cells, [], console) as shown:
        shown.cell_started(first.cell, folder, first.started_at)
        yield "a cell starts", rendered(shown.status())
        step = {"step": 2, "of": 4, "loss": 5.25, "seconds": 1.5, "at": 0.0}
        (folder / "progress.jsonl").write_text(json.dumps(step) + "\n")
        yield "two steps have ended", rendered(shown.status())
        shown.cell_finished(first)
        yield "a cell has ended", rendered(shown.status())
    # Such are all where a matrix limits all links, and the cluster none.
    matrix = replace(matrix, skipped={each.id: "no limited links" for each in matrix.cells})
    log = io.StringIO()
    with Progress(matrix, cells, [], Console(file=log, width=100)) as shown:
        shown.cell_finished(record(first.cell, "skipped"))
        yield "all cells are skipped", [*log.getvalue().splitlines(), *rendered(shown.status())]


def text() -> str:
    """All of them, at a time that stands still."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    with TemporaryDirectory() as folder, mock.patch.object(progress, "time", clock):
        shown = [*screens(), *displays(Path(folder))]
    return "\n".join(line for title, lines in shown for line in (f"# {title}", *lines, ""))


def test_screens_are_the_golden_ones() -> None:
    assert text() == GOLDEN.read_text(encoding="utf-8")


def test_older_records_have_no_table_of_variants() -> None:
    assert variants_table.table([record(cell(policy="none")), record(cell())]) is None


if __name__ == "__main__":
    GOLDEN.write_text(text(), encoding="utf-8")

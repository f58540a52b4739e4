"""docs/use.md: its matrix runs, its functions train."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fcdp
from experiments.clusters.emulated import EmulatedCluster
from experiments.commands.kinds import PRELOADED
from experiments.matrix import reader
from experiments.records.record import Record
from experiments.runner import runner
from experiments.runner.directory import RunDirectory
from tests.docs import block
from tests.experiments.stand_in import Observer
from tests.fcdp.training import topology_of
from tests.ranks import Pools


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's matrix file, with the files beside it that the page says there are."""
    monkeypatch.chdir(tmp_path)
    exec(block("use.md", "model"), {})
    (tmp_path / "prose.txt").write_text("In the beginning was the word. " * 200, encoding="utf-8")
    file = tmp_path / "mine.yaml"
    file.write_text(block("use.md", "matrix"), encoding="utf-8")
    return file


def test_the_matrix_of_the_page_runs(
    privileged: None, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")  # paths are relative to the file
    expanded = reader.read(str(matrix))
    directory = RunDirectory(tmp_path / "run")
    cluster = EmulatedCluster(expanded.cluster, preload=[*PRELOADED, "experiments.worker.worker"])
    records = runner.run(expanded.cells, {}, [], cluster, directory, Observer())
    assert [record.cell.strategy for record in records] == ["fsdp2", "fcdp"]
    fsdp2, fcdp = (measurement(record) for record in records)
    assert len(fcdp.losses) == 2
    assert fcdp.losses == pytest.approx(fsdp2.losses, rel=1e-6)
    assert fcdp.held_out_loss is not None
    assert fcdp.held_out_loss == pytest.approx(fsdp2.held_out_loss, rel=1e-6)
    # Records may be published: they name no folder of this machine.
    assert str(tmp_path) not in directory.records.read_text(encoding="utf-8")


def measurement(record: Record) -> Any:
    assert record.state == "ok", record.error
    return record.measurement


def read(folder: Path) -> list[bool]:
    scope: dict[str, Any] = {"torch": torch, "fcdp": fcdp, "topology": topology_of(2, 1)}
    text = block("use.md", "loading").replace('"qwen"', repr(str(folder)))
    exec(text, scope)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs = dict(expected.named_parameters())
    return [
        torch.equal(each.full_tensor(), theirs[name])
        for name, each in scope["model"].named_parameters()
    ]


def test_the_model_of_the_page_is_read(ranks: Pools, matrix: Path) -> None:
    assert all(map(all, ranks.run(2, read, matrix.parent / "qwen")))


def test_the_functions_of_the_page_train() -> None:
    scope: dict[str, Any] = {}
    exec(block("use.md", "functions"), scope)
    model, blocks = scope["build"](8)
    assert {*blocks} < {*model.modules()}
    sequences = torch.arange(18).view(2, 9)
    scope["loss"](model, sequences).backward()
    assert all(param.grad is not None for param in model.parameters())
